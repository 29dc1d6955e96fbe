"""Values that are no tensors ("byte items" in DCP): as nodes of the state image, and back.

Stock planners hand such values over as streams of ``torch.save`` and want them back so. Nothing of that kind is
stored: a value is encoded as everywhere in everstep, or refused by name; the stream that a stock planner loads from
is made in memory, of the decoded value.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ..errors import UnsupportedValue
from ..state import keys, objects
from ..state.codec import walk
from ..state.encode import Path
from ..state.pickled import load_pickled
from ..state.tree import Leaf, TreeEncoder
from ..state.wire import MUTABLE, STATE_BYTES_MAX, STATE_VERSION, Node, Tag, tag_of

STATE = "state_dict"
"""The part that holds the state dict: its keys are DCP's fully qualified names."""

ABOUT = "dcp"
"""The part that holds what DCP's planners need besides."""


@dataclass(slots=True)
class Encoded:
    """One value: its node, the tensors in it (the node refers to them by index), and whether it was a stream."""

    node: Node
    leaves: list[Leaf]
    stream: bool


class _Encoder(TreeEncoder):
    """Refuses what would come back as something else than it was."""

    def other(self, value: Any, text: str, path: Path) -> Node | None:
        if isinstance(value, torch.Tensor):
            raise self.refuse(
                value, text, "a tensor of this kind inside another value", "Give it a key of its own"
            )
        if objects.is_stateful(value):
            raise self.refuse(value, text, "an object", "Save its state_dict() instead")
        return super().other(value, text, path)


def encode_value(fqn: str, value: Any) -> Encoded:
    """The value of byte item ``fqn``. Raises UnsupportedValue, which names it."""
    stream = isinstance(value, io.BytesIO)
    encoder = _Encoder(None)
    encoder.part = STATE
    try:
        with torch.no_grad():
            node = encoder.node(value.getvalue() if stream else value, keys.text_component(fqn), (fqn,))
    except RecursionError:
        raise UnsupportedValue(f"{STATE}/{fqn}: containers lie too deep for this stack", path=fqn) from None
    return Encoded(node, encoder.leaves, stream)


def value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """The object behind a byte item: asked of the planner where that is known to give it, else taken out of the stream
    that the planner made of it."""
    if isinstance(planner, DefaultSavePlanner) and (
        type(planner).transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UnsupportedValue(
            f"{item.index.fqn}: the planner gave no stream for this value",
            found=type(data).__name__,
            expected="io.BytesIO",
            path=item.index.fqn,
        )
    data.seek(0)
    try:
        return load_pickled(data)
    except Exception as error:
        raise UnsupportedValue(
            f"{item.index.fqn}: the planner's stream holds no plain values",
            found=str(error).splitlines()[0][:200] if str(error) else type(error).__name__,
            expected="what torch.load(weights_only=True) reads",
            path=item.index.fqn,
        ) from None


def as_stream(value: Any, stream: bool) -> io.BytesIO:
    """The stream that a stock planner's ``load_bytes`` reads the value from."""
    found = io.BytesIO()
    torch.save(io.BytesIO(value) if stream else value, found)
    found.seek(0)
    return found


def relocate(node: Node, containers: int, entries: int) -> int:
    """Make ``node``, encoded (and decoded) alone, fit behind ``containers`` containers and ``entries`` entries of an
    image, in place; the number of its own containers."""
    count = 0
    for inner in walk(node):
        tag = tag_of(inner)
        if type(inner) is dict or tag in MUTABLE:
            count += 1
        if tag == Tag.ALIAS:
            inner[1] += containers
        elif tag in (Tag.REF, Tag.ARRAY_REF):
            inner[1] += entries
    return count


class ImageBuilder:
    """Puts one state image together: a flat map of names to nodes, and the part about it."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._containers = 1  # the map itself

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._nodes

    def tensor(self, fqn: str, index: int) -> None:
        """``fqn`` is the tensor of entry ``index``."""
        self._nodes[fqn] = [Tag.REF.value, index]

    def value(self, fqn: str, node: Node, entries: int = 0) -> None:
        """``fqn`` is a value; the entries it refers to begin at ``entries``."""
        own: Node = msgspec.msgpack.decode(msgspec.msgpack.encode(node))
        self._containers += relocate(own, self._containers, entries)
        self._nodes[fqn] = own

    def build(self, about: Mapping[str, Any]) -> bytes:
        """The state image. Raises UnsupportedValue."""
        encoder = _Encoder(None)
        encoder.part = ABOUT
        node: Node = msgspec.msgpack.decode(msgspec.msgpack.encode(encoder.node(dict(about), "", ())))
        if encoder.leaves:
            raise UnsupportedValue(
                f"{ABOUT}/{encoder.leaves[0].key}: a planner's data cannot hold tensors", path=ABOUT
            )
        relocate(node, self._containers, 0)
        data: bytes = msgspec.msgpack.encode({"v": STATE_VERSION, "parts": {STATE: self._nodes, ABOUT: node}})
        if len(data) > STATE_BYTES_MAX:
            raise UnsupportedValue(
                "plain values take too much room", found=len(data), expected=STATE_BYTES_MAX, path=STATE
            )
        return data

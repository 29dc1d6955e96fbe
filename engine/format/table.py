"""A layout as arrays, for questions that concern all ranks of a job: thousands of layouts, millions of boxes.

Of a layout only what such questions need is read: the schema (once for all ranks that have the same), boxes,
and what is stored. Places and images' sizes are not looked at; :func:`.layout.decode` proves those. numpy is
imported where the first array is needed, since whoever only moves layouts lives without it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..errors import Damaged, UnknownFormat
from . import layout as layouts
from .columns import BadColumn, unpack, unpack_array
from .constants import AXES_MAX, SIZE_MAX
from .dtypes import DTYPES
from .entries import Layout, Scope
from .fields import WHOLE, Own, read_own, read_schema

Array = Any
"""A numpy array. The module is imported where arrays are made, for it is not needed everywhere."""

SCHEMAS_MAX = 256
"""Decoded schemas that a reader remembers: as many as the stages and experts of a large job."""


@dataclass(frozen=True, slots=True, eq=False)
class SchemaTable:
    """A decoded schema: for each entry its name (part, key), dtype, scope and global shape. Compared by
    identity: a reader gives the same object for the same schema, as long as it remembers it."""

    names: list[tuple[str, str]]
    dtypes: list[str]
    scopes: list[int]
    shapes: list[tuple[int, ...]]
    has_global: bool
    """Whether any entry is one tensor of the whole job."""


@dataclass(frozen=True, slots=True)
class Table:
    """One rank's layout. ``own`` keeps the columns as they are stored (a few bytes for each number) until
    :meth:`boxes` and the others unpack them."""

    schema: SchemaTable
    own: Own
    name: str

    def counts(self) -> tuple[Array, Array]:
        """For each entry the number of its boxes, and whether it is the one box of the whole tensor."""
        codes = self._column(self.own.boxes, len(self.schema.names))
        whole = codes == WHOLE
        return codes.astype("i8") - 1 + 2 * whole, whole

    def stored(self) -> Array:
        """For each entry whether this rank stores it."""
        image = self._column(self.own.image, len(self.schema.names))
        return (image != 0) & (image <= len(self.own.images) - self.own.copies)

    def cuts(self, count: int) -> tuple[Array, Array]:
        """Offsets and lengths (``count`` numbers each) of all boxes that are not whole tensors, one number for
        each axis, in the order of entries, boxes and axes; unsigned, as wide as they are stored."""
        return self._column(self.own.offsets, count), self._column(self.own.lengths, count)

    def _column(self, data: bytes, count: int) -> Array:
        try:
            column = unpack_array(data)
        except BadColumn as problem:
            raise Damaged("the layout breaks a rule", name=self.name, found=str(problem)) from None
        if len(column) != count:
            raise Damaged(
                "the layout breaks a rule", name=self.name, found=f"{len(column)} values", expected=count
            )
        return column


class TableReader:
    """Reads layouts of many ranks; schemas that were met lately are not decoded again."""

    def __init__(self) -> None:
        self._schemas: OrderedDict[bytes, SchemaTable] = OrderedDict()

    def open(self, data: bytes, expected_hash: str, name: str) -> Table:
        """The layout of a stored object, proved to be the one that ``expected_hash`` names; raises as
        :func:`.layout.open_layout`."""
        return self.read(layouts.proved(data, expected_hash, name), name)

    def of(self, layout: Layout) -> Table:
        """A layout that is at hand."""
        return self.read(layouts.encode(layout), "layout")

    def read(self, encoded: bytes, name: str) -> Table:
        """The layout whose canonical bytes are ``encoded``. Raises Damaged or UnknownFormat, naming ``name``."""
        own = read_own(encoded, name)
        if own is None:  # of version 1: such runs are small enough to take the long way
            own = read_own(layouts.encode(layouts.decode(encoded, name)), name)
            assert own is not None
        schema = self._schemas.get(own.schema)
        if schema is None:
            schema = self._schemas[own.schema] = _schema(own.schema, name)
            if len(self._schemas) > SCHEMAS_MAX:
                self._schemas.popitem(last=False)
        else:
            self._schemas.move_to_end(own.schema)
        return Table(schema, own, name)


def _schema(data: bytes, name: str) -> SchemaTable:
    found = read_schema(data, name)
    unknown = [dtype for dtype in found.dtypes if dtype not in DTYPES]
    if unknown:
        raise UnknownFormat("the layout has dtypes that this release does not know", name=name, found=unknown)
    try:
        parts = [found.parts[one] for one in unpack(found.part)]
        dtypes = [found.dtypes[one] for one in unpack(found.dtype)]
        scopes, axes, sizes = unpack(found.scope), unpack(found.axes), unpack(found.shape)
        if not len(parts) == len(dtypes) == len(scopes) == len(axes) == len(found.key):
            raise BadColumn("columns differ in length")
        if sum(axes) != len(sizes) or max(axes, default=0) > AXES_MAX or max(sizes, default=0) > SIZE_MAX:
            raise BadColumn("shapes that are not possible")
        if max(scopes, default=0) >= len(Scope):
            raise BadColumn("an unknown scope")
    except (BadColumn, IndexError) as problem:
        raise Damaged("the layout breaks a rule", name=name, found=str(problem)) from None
    names = list(zip(parts, found.key, strict=True))
    shapes = []
    at = 0
    for count in axes:
        shapes.append(tuple(sizes[at : at + count]))
        at += count
    return SchemaTable(names, dtypes, scopes, shapes, Scope.GLOBAL.value in scopes)

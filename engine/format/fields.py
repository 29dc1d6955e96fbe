"""The stored form of a layout's fields, in every format version.

What most ranks of a job have alike (parts, keys, dtypes, scopes, global shapes) is a block of its own, the
*schema*: whoever reads the layouts of many ranks decodes each distinct one once. What is a rank's own (boxes,
images, places) are packed columns (:mod:`.columns`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..errors import Damaged, UnknownFormat
from .columns import BadColumn, pack, unpack
from .constants import AXES_MAX, FORMAT_VERSION, LAYOUT_BYTES_MAX, READABLE_VERSIONS
from .sealed import UPGRADE_HINT

WHOLE = 0
"""In the column of boxes: one box, which is the whole tensor. Else 1 + number of boxes."""


@dataclass(slots=True)
class Fields:
    """A layout's fields as they are stored, unpacked, whatever the version: lists by image and by entry.

    ``image`` is 0 where nothing lies here, else 1 + index into ``images``, the last ``copies`` of which have second
    copies; ``begin`` counts from the first
    data byte of the image, None for the usual places; ``boxes`` is None for one full box, else all offsets
    and lengths.
    """

    images: list[str]
    image_part: list[str]
    image_bytes: list[int]
    parts: list[str]
    dtypes: list[str]
    part: list[int]
    key: list[str]
    dtype: list[int]
    scope: list[int]
    shape: list[tuple[int, ...]]
    boxes: list[tuple[int, ...] | None]
    image: list[int]
    begin: list[int] | None
    copies: int = 0


class Schema(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is alike on most ranks. Columns are packed; ``shape`` has all entries' sizes one behind the other,
    ``axes`` how many each entry has."""

    parts: list[str]
    dtypes: list[str]
    part: bytes
    key: list[str]
    dtype: bytes
    scope: bytes
    axes: bytes
    shape: bytes


class Own(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A layout: the schema's bytes and what is a rank's own. ``offsets`` and ``lengths`` have, for all boxes
    that are not whole tensors, one number for each axis. ``copies`` is left out where there are none."""

    v: int
    schema: bytes
    images: list[str]
    image_part: list[str]
    image_bytes: list[int]
    boxes: bytes
    offsets: bytes
    lengths: bytes
    image: bytes
    begin: bytes | None
    copies: int = 0


class _Version1(msgspec.Struct, forbid_unknown_fields=True):
    """The form of version 1: every field as a list."""

    v: int
    images: list[str]
    image_part: list[str]
    image_bytes: list[int]
    parts: list[str]
    dtypes: list[str]
    part: list[int]
    key: list[str]
    dtype: list[int]
    scope: list[int]
    shape: list[tuple[int, ...]]
    boxes: list[tuple[int, ...] | None]
    image: list[int]
    begin: list[int]


class _Version(msgspec.Struct):
    v: int


_encoder = msgspec.msgpack.Encoder()
_own_decoder = msgspec.msgpack.Decoder(Own)
_schema_decoder = msgspec.msgpack.Decoder(Schema)
_version1_decoder = msgspec.msgpack.Decoder(_Version1)
_version_decoder = msgspec.msgpack.Decoder(_Version)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def encode_fields(fields: Fields, version: int = FORMAT_VERSION) -> bytes:
    """The canonical bytes of a layout with these fields, in a version from 2 on."""
    offsets: list[int] = []
    lengths: list[int] = []
    boxes: list[int] = []
    for shape, flat in zip(fields.shape, fields.boxes, strict=True):
        axes = len(shape)
        boxes.append(WHOLE if flat is None else 1 + len(flat) // (2 * axes or 1))
        for at in range(0, len(flat or ()), 2 * axes or 1):
            assert flat is not None
            offsets += flat[at : at + axes]
            lengths += flat[at + axes : at + 2 * axes]
    own = Own(
        v=version,
        schema=_encoder.encode(schema_of(fields)),
        images=fields.images,
        image_part=fields.image_part,
        image_bytes=fields.image_bytes,
        boxes=pack(boxes),
        offsets=pack(offsets),
        lengths=pack(lengths),
        image=pack(fields.image),
        begin=None if fields.begin is None else pack(fields.begin),
        copies=fields.copies,
    )
    return encode_own(own)


def schema_of(fields: Fields) -> Schema:
    """The schema of these fields."""
    return Schema(
        parts=fields.parts,
        dtypes=fields.dtypes,
        part=pack(fields.part),
        key=fields.key,
        dtype=pack(fields.dtype),
        scope=pack(fields.scope),
        axes=pack([len(shape) for shape in fields.shape]),
        shape=pack([size for shape in fields.shape for size in shape]),
    )


def encode_own(own: Own) -> bytes:
    """The canonical bytes of a layout in its stored form."""
    return _encoder.encode(own)


def read_own(data: bytes, name: str) -> Own | None:
    """The stored form of a layout of version 2 or later; None for one of version 1, which has another.

    Raises :class:`Damaged`, or :class:`UnknownFormat` for a version unknown here; both name ``name``.
    """
    if len(data) > LAYOUT_BYTES_MAX:
        raise Damaged(
            "the layout is too large", name=name, found=len(data), expected=f"<= {LAYOUT_BYTES_MAX}"
        )
    try:
        own = _own_decoder.decode(data)
        version = own.v
    except _UNREADABLE as problem:
        try:
            version = _version_decoder.decode(data).v
        except _UNREADABLE:
            version = FORMAT_VERSION
        if version in READABLE_VERSIONS[1:]:
            raise _unreadable(problem, name) from None
        own = None
    if own is not None and version in READABLE_VERSIONS[1:]:
        return own
    if version == 1:
        return None
    raise UnknownFormat(
        "the layout has another format version",
        name=name,
        found=version,
        expected=f"at most {FORMAT_VERSION}",
        hint=UPGRADE_HINT,
    )


def read_schema(data: bytes, name: str) -> Schema:
    """The schema whose bytes are ``data``. Raises :class:`Damaged`."""
    try:
        return _schema_decoder.decode(data)
    except _UNREADABLE as problem:
        raise _unreadable(problem, name) from None


def _unreadable(problem: Exception, name: str) -> Damaged:
    return Damaged("the layout cannot be read", name=name, found=str(problem))


def read_fields(data: bytes, name: str) -> tuple[int, Fields]:
    """The version and the fields of canonical bytes; columns may still contradict each other.

    Raises :class:`Damaged`, or :class:`UnknownFormat` for a version unknown here; both name ``name``.
    """
    own = read_own(data, name)
    if own is None:
        return 1, _read_version1(data, name)
    schema = read_schema(own.schema, name)
    try:
        shapes = _shapes(unpack(schema.axes), unpack(schema.shape))
        fields = Fields(
            images=own.images,
            image_part=own.image_part,
            image_bytes=own.image_bytes,
            parts=schema.parts,
            dtypes=schema.dtypes,
            part=unpack(schema.part),
            key=schema.key,
            dtype=unpack(schema.dtype),
            scope=unpack(schema.scope),
            shape=shapes,
            boxes=_flat_boxes(unpack(own.boxes), shapes, unpack(own.offsets), unpack(own.lengths)),
            image=unpack(own.image),
            begin=None if own.begin is None else unpack(own.begin),
            copies=own.copies,
        )
    except BadColumn as problem:
        raise Damaged("the layout breaks a rule", name=name, found=str(problem)) from None
    return own.v, fields


def _read_version1(data: bytes, name: str) -> Fields:
    try:
        found = _version1_decoder.decode(data)
    except _UNREADABLE as problem:
        raise _unreadable(problem, name) from None
    return Fields(**{field: getattr(found, field) for field in found.__struct_fields__ if field != "v"})


def _shapes(axes: list[int], sizes: list[int]) -> list[tuple[int, ...]]:
    """The flat column of sizes cut into shapes."""
    if sum(axes) != len(sizes):
        raise BadColumn(f"{len(sizes)} sizes for {sum(axes)} axes")
    if axes and max(axes) > AXES_MAX:
        raise BadColumn(f"a tensor of {max(axes)} axes")
    shapes = []
    at = 0
    for count in axes:
        shapes.append(tuple(sizes[at : at + count]))
        at += count
    return shapes


def _flat_boxes(
    boxes: list[int], shapes: list[tuple[int, ...]], offsets: list[int], lengths: list[int]
) -> list[tuple[int, ...] | None]:
    """For each entry None (whole), or its boxes' offsets and lengths in one tuple."""
    if len(boxes) != len(shapes):
        raise BadColumn(f"{len(boxes)} counts of boxes for {len(shapes)} entries")
    needed = sum([(count - 1) * len(shape) for count, shape in zip(boxes, shapes, strict=True) if count])
    if len(offsets) != needed or len(lengths) != needed:
        raise BadColumn(f"{len(offsets)} offsets and {len(lengths)} lengths, {needed} are needed")
    found: list[tuple[int, ...] | None] = []
    at = 0
    for count, shape in zip(boxes, shapes, strict=True):
        if count == WHOLE:
            found.append(None)
            continue
        axes, flat = len(shape), list[int]()
        if count > 1 and not axes:
            raise BadColumn("a box of a tensor without axes that is not whole")
        for _ in range(count - 1):
            flat += offsets[at : at + axes]
            flat += lengths[at : at + axes]
            at += axes
        found.append(tuple(flat))
    return found

"""Layouts: from the entries of a rank to places, and to canonical bytes and back.

A layout is per rank, content-addressed (by the hash of its canonical bytes) and stored once per run. Its
values are defined in :mod:`.entries` and offered here too.

The canonical bytes (:mod:`.fields`) are columns, one per field over all entries, which are quick to read and
compress well. What can be derived is not stored: sizes follow from dtypes and boxes, image headers from the
entries, places from the order that writers keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import zstandard

from ..errors import Damaged, UnknownFormat, UnsupportedValue
from . import images
from .constants import AXES_MAX, FORMAT_VERSION, HASH_BYTES, HEADER_BYTES_MAX, LAYOUT_BYTES_MAX, SIZE_MAX
from .dtypes import DTYPES, Dtype, header_type
from .entries import Box, Entry, EntrySpec, ImageSpec, Layout, Place, Scope
from .fields import Fields, encode_fields, read_fields
from .hashing import digest, hexdigest
from .names import copied_from, copy_name, shared_image, shared_with
from .vote import STATE_IMAGE
from .zstd import inflate

__all__ = [
    "Box",
    "Entry",
    "EntrySpec",
    "ImageSpec",
    "Layout",
    "Place",
    "Scope",
    "build_layout",
    "compress",
    "decode",
    "decompress",
    "encode",
    "layout_hash",
    "open_layout",
    "proved",
]

_MAGIC = b"EVSTLAYT"
_ENVELOPE_BYTES = len(_MAGIC) + 8 + HASH_BYTES
_LEVEL = 3
SHARED_SINCE = 3
"""Format version that brought shared images."""

_ImageKey = tuple["int | None", str, "tuple[int, ...]"]
"""The rank whose image it is a copy of (None: stored), its part, the ranks that share it."""


class _Invalid(Exception):
    """An entry or image that breaks a rule; becomes UnsupportedValue or Damaged at the module's edge."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


@dataclass(slots=True)
class _Row:
    """An entry before its image's header, and thus its absolute offset, is known. ``image`` counts on from the
    images into those with second copies."""

    part: str
    key: str
    dtype: Dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    scope: Scope
    image: int | None
    begin: int
    nbytes: int


# ---------------------------------------------------------------------------------------------- building


def build_layout(specs: Sequence[EntrySpec]) -> Layout:
    """Give every stored entry its place: one image per part, tensors by item size (largest first), then in
    the order given, so that each is naturally aligned and there are no holes. Those of which the same ranks keep second
    copies lie in a shared image of their own, by item size and key, so that these ranks give their copies the very same
    places, whatever else they hold.

    Raises :class:`UnsupportedValue` (its ``path`` is part/key) for unknown dtypes, boxes outside the shape, a
    key twice in a part, text that is not Unicode.
    """
    try:
        image_of: dict[_ImageKey, int] = {}
        copy_of: dict[_ImageKey, int] = {}
        rows: list[_Row] = []
        for spec in specs:
            row = _checked(spec.part, spec.key, spec.dtype, spec.shape, spec.boxes, spec.scope)
            if not spec.boxes:
                pass
            elif spec.stored:
                row.image = image_of.setdefault((None, spec.part, spec.shared), len(image_of))
            elif spec.copy_of is not None:
                # Numbered on behind the images, once it is known how many there are.
                row.image = ~copy_of.setdefault((spec.copy_of, spec.part, spec.shared), len(copy_of))
            rows.append(row)
        for row in rows:
            if row.image is not None and row.image < 0:
                row.image = len(image_of) + ~row.image
        names = _image_names(image_of) + _copy_names(copy_of)
        _place(rows, _shared(names, FORMAT_VERSION))
        parts = [part for _, part, _ in (*image_of, *copy_of)]
        return _assemble(rows, names, parts, len(copy_of), FORMAT_VERSION)
    except _Invalid as problem:
        raise UnsupportedValue("this entry cannot be stored", found=str(problem), path=problem.path) from None


def _shared(names: Sequence[str], version: int) -> list[bool]:
    """Which of these images have the order of shared ones; a copy's name ends like its image's."""
    return [version >= SHARED_SINCE and bool(shared_with(name)) for name in names]


def _place(rows: list[_Row], shared: Sequence[bool]) -> None:
    """Set ``begin`` of all stored rows to the usual place."""
    places = usual_places(
        [row.dtype.bits for row in rows],
        [row.image for row in rows],
        [row.nbytes for row in rows],
        [row.key for row in rows],
        shared,
    )
    for row, begin in zip(rows, places, strict=True):
        row.begin = begin


def usual_places(
    bits: Sequence[int],
    image: Sequence[int | None],
    nbytes: Sequence[int],
    keys: Sequence[str],
    shared: Sequence[bool],
) -> list[int]:
    """Where each entry's first byte lies behind its image's header (0 where it is not stored), as writers
    place them: by the size of an element, largest first, then in order, without holes. ``shared``, by image: whether
    the order is that of the keys instead."""
    ends = [0] * len(shared)
    places = [0] * len(bits)
    stored = [index for index, one in enumerate(image) if one is not None]
    if any(shared):
        stored.sort(key=lambda index: keys[index] if shared[image[index] or 0] else "")
    for index in sorted(stored, key=lambda index: -bits[index]):
        of = image[index]
        assert of is not None
        places[index] = ends[of]
        ends[of] += nbytes[index]
    return places


def _image_names(images: Collection[_ImageKey]) -> list[str]:
    """An image is named by its part, and the ranks that share it; a part that is called like the state image or a
    shared one gets ``@`` appended."""
    taken = {STATE_IMAGE, *(part for _, part, _ in images)}
    names = []
    for _, part, ranks in images:
        name = shared_image(part, ranks) if ranks else part
        if not ranks and (part == STATE_IMAGE or shared_with(part)):
            while name in taken:
                name += "@"
        names.append(name)
    return names


def _copy_names(images: Iterable[_ImageKey]) -> list[str]:
    return [copy_name(rank or 0, shared_image(part, ranks)) for rank, part, ranks in images]


def _checked(
    part: str, key: str, dtype: str, shape: tuple[int, ...], boxes: tuple[Box, ...], scope: Scope
) -> _Row:
    """The entry as a row without a place, its values checked."""
    row = DTYPES.get(dtype)
    if row is None:
        raise _Invalid(f"{part}/{key}", f"unknown dtype {dtype!r}")
    nbytes = _whole_bytes(row.bits, shape) if len(shape) <= AXES_MAX else -1
    if nbytes < 0:
        raise _Invalid(f"{part}/{key}", f"shape {shape[: AXES_MAX + 1]} is not possible")
    if _is_whole(boxes, shape):
        pass
    elif scope is not Scope.GLOBAL:
        raise _Invalid(f"{part}/{key}", "an entry of one rank alone must be whole")
    else:
        nbytes = 0
        for box in boxes:
            _check_box(f"{part}/{key}", box, shape)
            nbytes += (row.bits * box.volume + 7) // 8
        if len(set(boxes)) != len(boxes):
            raise _Invalid(f"{part}/{key}", "the same box twice")
    return _Row(part, key, row, shape, boxes, scope, None, 0, nbytes)


@lru_cache(maxsize=4096)
def _whole_bytes(bits: int, shape: tuple[int, ...]) -> int:
    """Bytes of a whole tensor; -1 if ``shape`` is not possible."""
    volume = prod(shape)
    return -1 if volume > SIZE_MAX or (shape and min(shape) < 0) else (bits * volume + 7) // 8


def _is_whole(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> bool:
    """Whether ``boxes`` is the one box of the whole tensor."""
    return len(boxes) == 1 and boxes[0].lengths == shape and boxes[0].offsets == (0,) * len(shape)


def _check_box(path: str, box: Box, shape: tuple[int, ...]) -> None:
    if not len(box.offsets) == len(box.lengths) == len(shape):
        raise _Invalid(path, f"box {box.offsets}+{box.lengths} has not the axes of shape {shape}")
    for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            raise _Invalid(path, f"box {box.offsets}+{box.lengths} lies outside shape {shape}")


def _check_texts(rows: list[_Row]) -> None:
    """Parts and keys must have a UTF-8 form, which lone surrogates have not."""
    try:
        "".join([row.part + row.key for row in rows]).encode()
    except UnicodeEncodeError:
        for row in rows:
            if any("\ud800" <= char <= "\udfff" for char in row.part + row.key):
                raise _Invalid(ascii(f"{row.part}/{row.key}"), "text with lone surrogates") from None


# -------------------------------------------------------------------------------------------- assembling


def _assemble(rows: list[_Row], names: list[str], parts: list[str], copies: int, version: int) -> Layout:
    """Headers, absolute offsets and the finished layout; checks what concerns entries together. The last ``copies``
    images have second copies."""
    stored = len(names) - copies
    if version >= SHARED_SINCE:
        _check_shared(names, parts, stored)
    for some in (names[:stored], names[stored:]):
        if len(set(some)) != len(some) or STATE_IMAGE in some:
            raise _Invalid("images", f"names {some} are not proper")
    members: list[list[int]] = [[] for _ in names]
    seen: set[tuple[str, str]] = set()
    shared = _shared(names, version)
    for index, row in enumerate(rows):
        if row.image is not None:
            if row.part != parts[row.image]:
                raise _Invalid(f"{row.part}/{row.key}", "stored in the image of another part")
            members[row.image].append(index)
        if row.scope is not Scope.GLOBAL and (row.image is None or row.image >= stored or shared[row.image]):
            raise _Invalid(
                f"{row.part}/{row.key}", "an entry of one rank alone must be stored by it, unshared"
            )
        seen.add((row.part, row.key))
    if len(seen) != len(rows):
        _raise_twice(rows)
    _check_texts(rows)
    for i, indices in enumerate(members):
        if shared[i]:
            indices.sort(key=lambda index: rows[index].key)
    specs = [_image_spec(rows, members[i], names[i], parts[i]) for i in range(len(names))]
    entries, copied = [], []
    for index, row in enumerate(rows):
        offset = 0 if row.image is None else row.begin + len(specs[row.image].header)
        place: tuple[int | None, int] = row.image, offset
        if row.image is not None and row.image >= stored:
            copied.append(Place(index, row.image - stored, offset))
            place = None, 0
        entries.append(
            Entry(row.part, row.key, row.dtype.name, row.shape, row.boxes, row.scope, *place, row.nbytes)
        )
    return Layout(tuple(entries), tuple(specs[:stored]), tuple(specs[stored:]), tuple(copied))


def _check_shared(names: list[str], parts: list[str], stored: int) -> None:
    """A name that says that ranks share the image is the one that its part gives; copies are of such images."""
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        image = name
        if number >= stored:
            found = copied_from(name)
            if found is None:
                raise _Invalid("images", f"{name!r} is no second copy of a shared image")
            image = found[1]
        ranks = shared_with(image)
        if ranks and image != shared_image(part, ranks):
            raise _Invalid("images", f"{name!r} is no shared image of part {part!r}")


def _raise_twice(rows: list[_Row]) -> None:
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.part, row.key) in seen:
            raise _Invalid(f"{row.part}/{row.key}", "the same key twice in a part")
        seen.add((row.part, row.key))


def _image_spec(rows: list[_Row], members: list[int], name: str, part: str) -> ImageSpec:
    """Header and size of one image; the tensors must lie one behind the other from byte 0 on."""
    members.sort(key=lambda index: (rows[index].begin, rows[index].nbytes > 0))
    names = images.TensorNames([rows[index].key for index in members if len(rows[index].boxes) == 1])
    tensors = []
    end = 0
    for index in members:
        row = rows[index]
        if row.begin != end:
            raise _Invalid(f"{row.part}/{row.key}", f"begins at {row.begin}, the one before ends at {end}")
        one = len(row.boxes) == 1
        for box in row.boxes:
            size = row.nbytes if one else (row.dtype.bits * box.volume + 7) // 8
            text = names.whole(row.key) if one else names.boxed(row.key, box.offsets)
            dtype, shape = header_type(row.dtype, box.lengths, size)
            tensors.append(images.Tensor(text, dtype, shape, end, end + size))
            end += size
    if end > SIZE_MAX:
        raise _Invalid(part, f"{end} bytes are too many for an image")
    if not tensors:
        raise _Invalid(name, "an image without entries")
    header = images.header(tensors)
    if len(header) > HEADER_BYTES_MAX:
        raise _Invalid(part, f"{len(tensors)} tensors need a header over {HEADER_BYTES_MAX} bytes")
    return ImageSpec(name, part, header, len(header) + end)


# ------------------------------------------------------------------------------------------------- codec


def encode(layout: Layout) -> bytes:
    """The canonical bytes of ``layout``: equal layouts give equal bytes, whoever encodes them."""
    return _encode(layout, FORMAT_VERSION)


def _encode(layout: Layout, version: int) -> bytes:
    images = (*layout.images, *layout.copies)
    entries = layout.entries
    lies: list[int | None] = [None] * len(entries)
    begins = [0] * len(entries)
    for index, image, offset in layout.places():
        lies[index] = image
        begins[index] = offset - len(images[image].header)
    usual = begins == _usual(entries, lies, _shared([image.name for image in images], version))
    parts: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    return encode_fields(
        Fields(
            images=[image.name for image in images],
            image_part=[image.part for image in images],
            image_bytes=_data_bytes(layout),
            part=[parts.setdefault(entry.part, len(parts)) for entry in entries],
            parts=list(parts),
            dtype=[dtypes.setdefault(entry.dtype, len(dtypes)) for entry in entries],
            dtypes=list(dtypes),
            key=[entry.key for entry in entries],
            scope=[int(entry.scope) for entry in entries],
            shape=[entry.shape for entry in entries],
            boxes=[_flat_boxes(entry.boxes, entry.shape) for entry in entries],
            image=[0 if image is None else 1 + image for image in lies],
            begin=None if usual else begins,
            copies=len(layout.copies),
        ),
        version,
    )


def _data_bytes(layout: Layout) -> list[int]:
    """Sizes of all images without their headers."""
    return [image.nbytes - len(image.header) for image in (*layout.images, *layout.copies)]


def _usual(entries: Sequence[Entry], lies: Sequence[int | None], shared: Sequence[bool]) -> list[int]:
    """Where the entries would begin if they were placed as writers do."""
    return usual_places(
        [DTYPES[entry.dtype].bits for entry in entries],
        lies,
        [entry.nbytes for entry in entries],
        [entry.key for entry in entries],
        shared,
    )


def _flat_boxes(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if _is_whole(boxes, shape):
        return None
    return tuple([number for box in boxes for number in (*box.offsets, *box.lengths)])


def decode(data: bytes, name: str = "layout") -> Layout:
    """The layout whose canonical bytes are ``data``, of this format version or a former one.

    Every rule is checked, sizes first; bytes that are not canonical in their version are refused (but for version
    1). Raises :class:`Damaged`, or :class:`UnknownFormat` for another version or a dtype unknown here; both name
    ``name``. That the bytes are the ones asked for is the caller's check (:func:`layout_hash`, or
    :func:`open_layout`).
    """
    version, fields = read_fields(data, name)
    unknown = [dtype for dtype in fields.dtypes if dtype not in DTYPES]
    if unknown:
        raise UnknownFormat("the layout has dtypes that this release does not know", name=name, found=unknown)
    try:
        rows = _rows(fields, version)
        layout = _assemble(rows, fields.images, fields.image_part, fields.copies, version)
        if _data_bytes(layout) != fields.image_bytes:
            raise _Invalid("images", "sizes are not those of the entries")
        if version > 1 and _encode(layout, version) != data:
            raise _Invalid("layout", "bytes are not canonical")
    except _Invalid as problem:
        raise Damaged("the layout breaks a rule", name=name, found=str(problem)) from None
    return layout


def _rows(fields: Fields, version: int) -> list[_Row]:
    """The fields as checked rows."""
    count = len(fields.key)
    scopes = len(Scope) if version > 1 else Scope.FIRST.value
    for field in ("part", "dtype", "scope", "shape", "boxes", "image", "begin"):
        values = getattr(fields, field)
        if values is not None and len(values) != count:
            raise _Invalid(field, f"{len(values)} values for {count} entries")
    if len(fields.image_part) != len(fields.images):
        raise _Invalid("images", "columns differ in length")
    if not 0 <= fields.copies <= len(fields.images):
        raise _Invalid("copies", f"{fields.copies} of {len(fields.images)} images")
    for field, limit in (("part", len(fields.parts)), ("dtype", len(fields.dtypes)), ("scope", scopes)):
        _check_range(field, getattr(fields, field), limit)
    _check_range("image", fields.image, len(fields.images) + 1)
    _check_range("begin", fields.begin or [], SIZE_MAX + 1)
    by_number = tuple(Scope)
    wholes: dict[tuple[int, ...], tuple[Box, ...]] = {}  # most entries are whole, and few shapes are many
    rows = []
    for part, key, dtype, scope, shape, flat, image in zip(
        fields.part,
        fields.key,
        fields.dtype,
        fields.scope,
        fields.shape,
        fields.boxes,
        fields.image,
        strict=True,
    ):
        if flat is not None:
            boxes = _boxes(key, flat, len(shape))
        elif (boxes := wholes.get(shape, ())) == ():
            boxes = wholes[shape] = (Box.full(shape),)
        row = _checked(fields.parts[part], key, fields.dtypes[dtype], shape, boxes, by_number[scope])
        row.image = image - 1 if image else None
        rows.append(row)
    if fields.begin is None:
        _place(rows, _shared(fields.images, version))
    else:
        for row, begin in zip(rows, fields.begin, strict=True):
            if row.image is None and begin:
                raise _Invalid(f"{row.part}/{row.key}", f"begins at {begin}, but is not stored")
            row.begin = begin
    return rows


def _check_range(field: str, values: list[int], limit: int) -> None:
    if values and not (min(values) >= 0 and max(values) < limit):
        raise _Invalid(field, f"a value outside 0..{limit - 1}")


def _boxes(key: str, flat: tuple[int, ...], axes: int) -> tuple[Box, ...]:
    if not flat:
        return ()
    if not axes or len(flat) % (2 * axes):
        raise _Invalid(key, f"{len(flat)} numbers are no boxes of {axes} axes")
    return tuple(
        Box(flat[at : at + axes], flat[at + axes : at + 2 * axes]) for at in range(0, len(flat), 2 * axes)
    )


def layout_hash(encoded: bytes) -> str:
    """What names a layout: the hash of its canonical bytes, 32 hexadecimal digits."""
    return hexdigest(encoded)


# --------------------------------------------------------------------------------------- stored envelope


def compress(encoded: bytes) -> bytes:
    """The stored form: magic, length of ``encoded``, hash over both and the zstandard frame, then the frame.

    A zstandard frame has bits that change nothing when flipped; the hash finds those as well.
    """
    frame: bytes = zstandard.ZstdCompressor(level=_LEVEL).compress(encoded)
    head = _MAGIC + len(encoded).to_bytes(8, "little")
    return head + digest(head + frame) + frame


def decompress(data: bytes, name: str = "layout") -> bytes:
    """What :func:`compress` was given; :class:`Damaged` naming ``name`` otherwise. Output is bounded."""
    head, frame = data[: len(_MAGIC) + 8], data[_ENVELOPE_BYTES:]
    if len(data) < _ENVELOPE_BYTES or not head.startswith(_MAGIC):
        raise Damaged("this is no layout", name=name, found=bytes(data[:8]), expected=_MAGIC)
    stored = data[len(head) : _ENVELOPE_BYTES]
    found = digest(head + frame)
    if found != stored:
        raise Damaged("the layout's hash is wrong", name=name, found=found.hex(), expected=stored.hex())
    nbytes = int.from_bytes(head[len(_MAGIC) :], "little")
    return inflate(frame, nbytes, LAYOUT_BYTES_MAX, name)


def open_layout(data: bytes, expected_hash: str, name: str) -> Layout:
    """The layout of a stored object, proved to be the one that ``expected_hash`` names.

    Every failure is :class:`Damaged` (or :class:`UnknownFormat`, once the hash has been found right).
    """
    return decode(proved(data, expected_hash, name), name)


def proved(data: bytes, expected_hash: str, name: str) -> bytes:
    """The canonical bytes in a stored object, proved to be those that ``expected_hash`` names. Raises
    :class:`Damaged`."""
    encoded = decompress(data, name)
    found = layout_hash(encoded)
    if found != expected_hash:
        raise Damaged("the layout is not the one asked for", name=name, found=found, expected=expected_hash)
    return encoded

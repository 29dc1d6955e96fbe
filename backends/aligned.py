"""Memory at known addresses: what direct I/O asks for.

``O_DIRECT`` wants file offset, length and memory address to be multiples of the device's block. Everything
here counts in :data:`BLOCK`, which is a multiple of every block size in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from .errors import Permanent

BLOCK = 4096
"""Bytes; the alignment that direct I/O gets."""


HUGE_PAGE = 2 << 20
"""Bytes, on most machines."""


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the C interface: the only way to a read-only view's address without further
    libraries."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None
_PYBUF_SIMPLE = 0


def address_of(view: memoryview) -> int:
    """The address of the first byte of a contiguous view, read-only ones included."""
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), _PYBUF_SIMPLE)
    address = int(buffer.buf or 0)
    _release_buffer(ctypes.byref(buffer))
    return address


def is_aligned(view: memoryview) -> bool:
    """Whether the view starts at a multiple of :data:`BLOCK`."""
    return address_of(view) % BLOCK == 0


def aligned_buffer(nbytes: int) -> memoryview:
    """A private writable buffer of ``nbytes`` (rounded up to whole blocks), page-aligned, zeroed. It is freed
    with the last view of it.

    Huge pages, where the system gives them: direct I/O pins and maps page by page, so that reads into small
    pages took nearly twice as long here, and touching them first costs a fault each.
    """
    size = max(round_up(nbytes), BLOCK)
    # Only what is a multiple of a huge page is put where these begin; what nobody touches takes no memory.
    whole = size if size < HUGE_PAGE else -(-size // HUGE_PAGE) * HUGE_PAGE
    buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)[:size]


def round_up(nbytes: int) -> int:
    """The next multiple of :data:`BLOCK`."""
    return -(-nbytes // BLOCK) * BLOCK


def round_down(nbytes: int) -> int:
    """The multiple of :data:`BLOCK` at or below."""
    return nbytes // BLOCK * BLOCK


def as_bytes(view: memoryview, name: str) -> memoryview:
    """The view as one row of bytes. Raises Permanent if it is not contiguous."""
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise Permanent(name, "a view that is not contiguous cannot be written or filled")
    return memoryview(b"") if view.nbytes == 0 else view.cast("B")

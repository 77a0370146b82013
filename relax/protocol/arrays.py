"""How a numpy array travels: dtype and shape in the header, the bytes raw in a frame of their own.

In the header an array is `[dtype, shape, offset]`: where its bytes begin among those of the small arrays behind the
header, or None for a large one, which is the next frame. Arrays below `SMALL_ARRAY` bytes share the first frame: every
frame costs as much as copying some tens of kilobytes, and zmq copies those anyway.
"""

import math
import reprlib
from collections.abc import Sequence

import numpy as np

from relax.protocol.errors import Refused
from relax.protocol.frames import ALIGN, Outgoing

SMALL_ARRAY = 32 * 1024
SMALL_TOTAL = 256 * 1024
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48

_NAMES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
DTYPES: dict[str, np.dtype] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
_CODES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_BOOL = DTYPES["b1"]


class Incoming:
    """The bytes that came with a header, taken array after array, in order; each byte and frame exactly once."""

    __slots__ = ("_at", "_large", "_next", "_small")

    def __init__(self, small: memoryview | bytes, large: Sequence) -> None:
        self._small, self._at = small, 0
        self._large, self._next = large, 0

    def take(self, offset: object, size: int):
        """What holds an array of `size` bytes: a slice of the first frame, or the next frame when `offset` is None."""
        if offset is None:
            if self._next >= len(self._large):
                raise Refused("frames", f"the header names more large arrays than the {len(self._large)} that came")
            self._next += 1
            return self._large[self._next - 1]
        if type(offset) is not int or offset != self._at:
            raise Refused("array", f"expected an offset of {self._at}, got {_shown(offset)}")
        self._at += size + -size % ALIGN
        return self._small[offset : offset + size]

    def finish(self) -> None:
        if self._next != len(self._large):
            raise Refused("frames", f"{len(self._large)} frames came, the header names {self._next}")
        if self._at != len(self._small):
            raise Refused("frames", f"{len(self._small)} bytes came behind the header, it names {self._at}")


def pack_array(value: object, out: Outgoing) -> list:
    """Header entry of an array; its bytes go to `out`. Raises TypeError with the reason."""
    if type(value) is not np.ndarray:
        raise TypeError(f"expected a numpy array, got {type(value).__name__}")
    code = _CODES.get(value.dtype)
    if code is None:
        raise TypeError(f"arrays of dtype {value.dtype} do not travel (little-endian {', '.join(_NAMES)} do)")
    if value.ndim > MAX_DIMENSIONS:
        raise TypeError(f"{value.ndim} dimensions, at most {MAX_DIMENSIONS} travel")
    size, offset = value.nbytes, out.small_bytes
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    if size < SMALL_ARRAY and offset + size <= SMALL_TOTAL:
        out.small.append(flat)
        out.small_bytes = offset + size + -size % ALIGN
        return [code, value.shape, offset]
    out.large.append(flat)
    return [code, value.shape, None]


def unpack_array(wire: object, frames: Incoming) -> np.ndarray:
    """The array of a header entry, read-only and without a copy over the frame that holds it."""
    if type(wire) is not list or len(wire) != 3:
        raise Refused("type", f"expected an array entry [dtype, shape, offset], got {_shown(wire)}")
    code, shape, offset = wire
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise Refused("array", f"dtype {_shown(code)} is not one of {', '.join(_NAMES)}")
    if not _is_shape(shape):
        raise Refused("array", f"bad shape {_shown(shape)}")
    need = math.prod(shape) * dtype.itemsize
    data = frames.take(offset, need)
    have = len(data)
    if need != have:
        raise Refused("array", f"shape {tuple(shape)} of {code} takes {need} bytes, {have} came")
    if need == 0:
        array = np.empty(shape, dtype)
    else:
        array = np.frombuffer(data, dtype).reshape(shape)
        if dtype is _BOOL and array.view(np.uint8).max() > 1:
            raise Refused("array", "a boolean array holds bytes other than 0 and 1")
        if not array.flags.aligned:
            # zmq may hand out a frame as a slice of its read buffer, at any address.
            array = array.copy()
    array.flags.writeable = False
    return array


def _is_shape(shape: object) -> bool:
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        return False
    # numpy rejects extents whose product overflows even where another extent is 0.
    return math.prod(n or 1 for n in shape) < MAX_ELEMENTS


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 60, 60


def _shown(value: object) -> str:
    # Whoever sent it may have made it deeper or longer than repr can stand.
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

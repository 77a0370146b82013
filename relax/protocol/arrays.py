"""How a numpy array travels: dtype and shape in the header, the bytes raw in a frame of their own.

On the wire an array is `[dtype, shape, bytes or None]`; None means "the next frame". Arrays below `PACKED_ARRAY` bytes
lie in the header itself: every frame costs as much as copying some tens of kilobytes, and zmq copies those anyway.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax.protocol.errors import Refused

PACKED_ARRAY = 32 * 1024
PACKED_TOTAL = 256 * 1024
MAX_DIMENSIONS = 8

_NAMES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
DTYPES: dict[str, np.dtype] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
_CODES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_BOOL = DTYPES["b1"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of one message, in bytes and frames, checked by the sender and again by the receiver."""

    header_bytes: int = 16 * 2**20
    frame_bytes: int = 256 * 2**20
    message_bytes: int = 1024 * 2**20
    frames: int = 1024


class Outgoing:
    """The frames that follow the header of one message while it is being written."""

    __slots__ = ("frames", "packed")

    def __init__(self) -> None:
        self.frames: list[np.ndarray] = []
        self.packed = 0


class Incoming:
    """The frames that followed a header, taken one after the other; each must be taken exactly once."""

    __slots__ = ("_frames", "_next")

    def __init__(self, frames: Sequence) -> None:
        self._frames, self._next = frames, 0

    def take(self):
        if self._next >= len(self._frames):
            raise Refused("frames", f"the header names more arrays than the {len(self._frames)} frames that came")
        frame = self._frames[self._next]
        self._next += 1
        return frame

    def finish(self) -> None:
        if self._next != len(self._frames):
            raise Refused("frames", f"{len(self._frames)} frames came, the header names {self._next}")


def pack_array(value: object, out: Outgoing) -> list:
    """Header entry of an array; appends its bytes to `out` unless they are few. Raises TypeError with the reason."""
    if type(value) is not np.ndarray:
        raise TypeError(f"expected a numpy array, got {type(value).__name__}")
    code = _CODES.get(value.dtype)
    if code is None:
        raise TypeError(f"arrays of dtype {value.dtype} do not travel (little-endian {', '.join(_NAMES)} do)")
    if value.ndim > MAX_DIMENSIONS:
        raise TypeError(f"{value.ndim} dimensions, at most {MAX_DIMENSIONS} travel")
    size = value.nbytes
    if size < PACKED_ARRAY and out.packed + size <= PACKED_TOTAL:
        out.packed += size
        return [code, value.shape, value.tobytes()]
    out.frames.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return [code, value.shape, None]


def unpack_array(wire: object, frames: Incoming) -> np.ndarray:
    """The array of a header entry, read-only and without a copy over the frame that holds it."""
    if type(wire) is not list or len(wire) != 3:
        raise Refused("type", f"expected an array entry [dtype, shape, bytes], got {_shown(wire)}")
    code, shape, data = wire
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise Refused("array", f"dtype {_shown(code)} is not one of {', '.join(_NAMES)}")
    if (
        type(shape) is not list
        or len(shape) > MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**48 for n in shape)
    ):
        raise Refused("array", f"bad shape {_shown(shape)}")
    if data is None:
        data = frames.take()
    elif type(data) is not bytes:
        raise Refused("type", f"expected the bytes of an array, got {_shown(data)}")
    need, have = math.prod(shape) * dtype.itemsize, len(data)
    if need != have:
        raise Refused("array", f"shape {tuple(shape)} of {code} takes {need} bytes, {have} came")
    if need == 0:
        array = np.empty(shape, dtype)
    else:
        array = np.frombuffer(data, dtype).reshape(shape)
        if dtype is _BOOL and array.view(np.uint8).max() > 1:
            raise Refused("array", "a boolean array holds bytes other than 0 and 1")
        if not array.flags.aligned:
            # zmq hands out small frames as slices of its read buffer, at any address.
            array = array.copy()
    array.flags.writeable = False
    return array


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""How a message lies in frames: a first frame with everything small, and a frame for each large array.

The first frame is a prefix, a msgpack header, padding, and the bytes of the small arrays, each at a multiple of
`ALIGN` so that they can be used where they lie. They are put together only when the message is sent, in one copy.
"""

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from relax.protocol.errors import EncodeError, Refused

ALIGN = 8
# Bounds what a header can become in memory: its bytes may stand for tens of times as many, as Python objects.
MAX_ITEMS = 2**20
_PADDING = [bytes(n) for n in range(ALIGN)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of one message, in bytes and frames, checked by the sender and again by the receiver."""

    header_bytes: int = 16 * 2**20
    frame_bytes: int = 256 * 2**20
    message_bytes: int = 1024 * 2**20
    frames: int = 1024


class Outgoing:
    """The arrays of one message while it is being written: `small` behind the header, `large` in frames."""

    __slots__ = ("large", "small", "small_bytes")

    def __init__(self) -> None:
        self.large: list[np.ndarray] = []
        self.small: list[np.ndarray] = []
        self.small_bytes = 0


class Packed:
    """A written message: `frames(prefix)` are its frames, any number of times. The arrays are those of the message."""

    __slots__ = ("_large", "_small", "header", "size")

    def __init__(self, header: bytes, out: Outgoing) -> None:
        self.header, self._small, self._large = header, out.small, out.large
        self.size = len(header) + out.small_bytes + sum(a.nbytes for a in out.large)

    def frames(self, prefix: bytes) -> list[Any]:
        first = first_frame(prefix, self.header, self._small)
        return [first, *self._large] if self._large else [first]


def pack(packer: msgpack.Packer, kind: str, values: list, out: Outgoing, limits: Limits) -> Packed:
    """The header's values and the arrays that they left in `out`, within the limits. Raises EncodeError."""
    try:
        header = packer.pack(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(kind, "", f"{error}") from error
    sizes = [array.nbytes for array in out.large]
    if len(header) + out.small_bytes > limits.header_bytes:
        problem = f"the header takes {len(header) + out.small_bytes} bytes, at most {limits.header_bytes} travel"
        raise EncodeError(kind, "", problem)
    if len(sizes) > limits.frames:
        raise EncodeError(kind, "", f"{len(sizes)} large arrays, at most {limits.frames} travel in one message")
    if sizes and max(sizes) > limits.frame_bytes:
        raise EncodeError(kind, "", f"an array takes {max(sizes)} bytes, at most {limits.frame_bytes} travel")
    if sum(sizes) > limits.message_bytes:
        raise EncodeError(kind, "", f"{sum(sizes)} bytes of arrays, at most {limits.message_bytes} travel")
    return Packed(header, out)


def first_frame(prefix: bytes, header: bytes, small: list[np.ndarray]) -> bytes:
    if not small:
        return prefix + header
    parts: list[Any] = [prefix, header, _PADDING[-(len(prefix) + len(header)) % ALIGN]]
    for array in small:
        parts += (array, _PADDING[-array.nbytes % ALIGN])
    return b"".join(parts)


def split(frame: bytes, prefix: int, length: int) -> tuple[list, memoryview]:
    """The header's values and the bytes of the small arrays, of a first frame with a header of `length` bytes."""
    end = prefix + length
    if end > len(frame):
        raise Refused("header", f"a header of {length} bytes in a frame of {len(frame)}", field="head")
    view = memoryview(frame)
    try:
        if length > MAX_ITEMS:
            values = msgpack.unpackb(view[prefix:end], ext_hook=_no_extension, **_counted())
        else:  # so few bytes cannot hold more items
            values = msgpack.unpackb(view[prefix:end], ext_hook=_no_extension)
    except (ValueError, msgpack.UnpackException) as error:
        raise Refused("header", f"no msgpack header: {type(error).__name__} {error}", field="header") from None
    if type(values) is not list:
        raise Refused("header", f"the header is no array but {type(values).__name__}", field="header")
    return values, view[end + -end % ALIGN :]


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _counted() -> dict[str, Any]:
    """Arguments for unpackb that refuse a header of more than MAX_ITEMS items while it is being read."""
    left = MAX_ITEMS

    def count(container: list | dict) -> list | dict:
        nonlocal left
        left -= 1 + len(container)
        if left < 0:
            raise ValueError(f"more than {MAX_ITEMS} items")
        return container

    return {"list_hook": count, "object_hook": count, "max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS}


def check_sizes(frames: list[Any], limits: Limits) -> None:
    """Raises Refused when a message has no, too many or too large frames."""
    if not frames:
        raise Refused("header", "a message without frames", field="head")
    if len(frames) - 1 > limits.frames:
        raise Refused("frames", f"more than {limits.frames} frames came", field="frames")
    total = 0
    for i, frame in enumerate(frames):
        # The sender's limit is without prefix and padding.
        size, limit = len(frame), limits.frame_bytes if i else limits.header_bytes + limits.header_bytes // 8
        total += size
        if size > limit:
            raise Refused("size", f"{size} bytes came, at most {limit} are allowed", field=f"frame {i}")
    if total > limits.message_bytes + 2 * limits.header_bytes:
        raise Refused("size", f"{total} bytes came, at most {limits.message_bytes} are allowed", field="frames")

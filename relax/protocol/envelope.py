"""What stands around a message on the wire: who sends it, in which run, and where it is in the stream.

The first frame of every message is a fixed head and a msgpack array behind it. The head (`HEAD`) is written anew at
each transmission, so that a repeated message carries the sender's newest `base`; the array is packed once.

    act      from -> to         number              base                      array after the address
    TELL     sender, receiver   seq                 lowest unacknowledged     kind, schema, body
    ASK      sender, receiver   ask id              lowest open ask           kind, schema, body
    PROBE    sender, receiver   highest seq sent    lowest unacknowledged     lowest open ask, open asks
    SETTLED  sender, receiver   ask id              lowest open ask
    ACK      receiver, sender   next seq expected   highest seq acceptable    probe's number or 0, asks to repeat
    REPLY    receiver, sender   ask id              0                         kind, schema, body
    NOTHING  receiver, sender   ask id              0                         (the handler returned None)
    ERROR    receiver, sender   ask id              0                         text
    REFUSED  receiver, sender   seq or ask id       act refused               text
"""

import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from relax.protocol.arrays import Limits
from relax.protocol.errors import Refused

HEAD: Final = struct.Struct("<3sBBQQ")
MAGIC: Final = b"Rx\x01"

TELL, ASK, PROBE, SETTLED, ACK, REPLY, NOTHING, ERROR, REFUSED = range(1, 10)
NAMES: Final = ("", "tell", "ask", "probe", "settled", "ack", "reply", "nothing", "error", "refused")

# TELL: acknowledge at once. ACK: a message was missing, repeat from `number`. REFUSED: nothing from you is acceptable.
URGENT: Final = 1

ADDRESS_MAX: Final = 256
_ADDRESS_TYPES = (str, int, str, str, int, str)


@dataclass(frozen=True, slots=True)
class Peer:
    """A mailbox as another one sees it. `endpoint` is where it can be told and asked."""

    name: str
    endpoint: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name} ({self.endpoint})"


@dataclass(slots=True)
class Envelope:
    """A parsed first frame; `rest` is what the table above shows after the address."""

    act: int
    flags: int
    number: int
    base: int
    run_id: str
    lineage: int
    name: str
    incarnation: str
    link: int
    endpoint: str
    rest: list


def head(act: int, flags: int, number: int, base: int) -> bytes:
    return HEAD.pack(MAGIC, act, flags, number, base)


def parse_head(frame: bytes) -> tuple[int, int, int, int]:
    """(act, flags, number, base) of a first frame. Raises Refused."""
    if len(frame) < HEAD.size:
        raise Refused("header", f"a first frame of {len(frame)} bytes, the head alone takes {HEAD.size}", field="head")
    magic, act, flags, number, base = HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise Refused("header", f"starts with {magic!r}, not {MAGIC!r}: another protocol or version", field="head")
    if not TELL <= act <= REFUSED:
        raise Refused("header", f"unknown act {act}", field="act")
    return act, flags, number, base


def parse(frames: list[Any], limits: Limits) -> Envelope:
    """The envelope of a whole message, every size and type of the address checked. Raises Refused."""
    act, flags, number, base = parse_head(frames[0])
    check_sizes(frames, limits)
    try:
        values = msgpack.unpackb(memoryview(frames[0])[HEAD.size :])
    except (ValueError, msgpack.UnpackException) as error:
        raise Refused("header", f"no msgpack array: {type(error).__name__} {error}", field="address") from None
    if type(values) is not list or tuple(map(type, values[:6])) != _ADDRESS_TYPES:
        raise Refused("header", "no [run id, lineage, name, incarnation, link, endpoint]", field="address")
    if max(map(len, (values[0], values[2], values[3], values[5]))) > ADDRESS_MAX:
        raise Refused("header", f"an entry of more than {ADDRESS_MAX} characters", field="address")
    run_id, lineage, name, incarnation, link, endpoint = values[:6]
    return Envelope(act, flags, number, base, run_id, lineage, name, incarnation, link, endpoint, values[6:])


def check_sizes(frames: list[Any], limits: Limits) -> None:
    """Raises Refused when a message has too many or too large frames."""
    if len(frames) - 1 > limits.frames:
        raise Refused("frames", f"more than {limits.frames} frames came", field="frames")
    total = 0
    for i, frame in enumerate(frames):
        size, limit = len(frame), limits.frame_bytes if i else limits.header_bytes + HEAD.size
        total += size
        if size > limit:
            raise Refused("size", f"{size} bytes came, at most {limit} are allowed", field=f"frame {i}")
    if total > limits.message_bytes + limits.header_bytes + HEAD.size:
        raise Refused("size", f"{total} bytes came, at most {limits.message_bytes} are allowed", field="frames")

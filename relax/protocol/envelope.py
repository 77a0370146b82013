"""What stands around a message on the wire: who sends it, in which run, and where it is in the stream.

The first frame of every message (`frames.py`) begins with a fixed head: magic and version, act, flags, length of the
msgpack array behind it, number, base. The head is written anew at each transmission, so that a repeated message
carries the sender's newest `base`; the array is packed once.

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

from relax.protocol.errors import Refused
from relax.protocol.frames import Limits, check_sizes, split

HEAD: Final = struct.Struct("<3sBBIQQ")
MAGIC: Final = b"Rx\x01"

TELL, ASK, PROBE, SETTLED, ACK, REPLY, NOTHING, ERROR, REFUSED = range(1, 10)
NAMES: Final = ("", "tell", "ask", "probe", "settled", "ack", "reply", "nothing", "error", "refused")

# The run id of a mailbox that does not know its run yet; it may only ask what is open to strangers.
STRANGER: Final = ""

# TELL: acknowledge at once. ACK: a message was missing, repeat from `number`. REFUSED: nothing from you is acceptable.
URGENT: Final = 1

ADDRESS_MAX: Final = 256
# Far above what a run counts up to, and far enough below 2**64 that nothing added to it leaves the head's 64 bits.
NUMBER_MAX: Final = 2**60
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
    """A parsed first frame; `rest` is what the table above shows after the address, `small` the bytes behind it."""

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
    small: memoryview


def head(act: int, flags: int, number: int, base: int, header: bytes) -> bytes:
    """The prefix of a first frame whose msgpack array is `header`."""
    return HEAD.pack(MAGIC, act, flags, len(header), number, base)


def parse(frames: list[Any], limits: Limits) -> Envelope:
    """The envelope of a whole message, every size and type of the address checked. Raises Refused."""
    check_sizes(frames, limits)
    first = frames[0]
    if len(first) < HEAD.size:
        raise Refused("header", f"a first frame of {len(first)} bytes, the head alone takes {HEAD.size}", field="head")
    magic, act, flags, length, number, base = HEAD.unpack_from(first)
    if magic != MAGIC:
        raise Refused("header", f"starts with {magic!r}, not {MAGIC!r}: another protocol or version", field="head")
    if not TELL <= act <= REFUSED:
        raise Refused("header", f"unknown act {act}", field="act")
    if number > NUMBER_MAX or base > NUMBER_MAX:
        raise Refused("header", f"{max(number, base)} is no number that a sender counts up to", field="number")
    values, small = split(first, HEAD.size, length)
    if tuple(map(type, values[:6])) != _ADDRESS_TYPES:
        raise Refused("header", "no [run id, lineage, name, incarnation, link, endpoint]", field="address")
    if max(map(len, (values[0], values[2], values[3], values[5]))) > ADDRESS_MAX:
        raise Refused("header", f"an entry of more than {ADDRESS_MAX} characters", field="address")
    run_id, lineage, name, incarnation, link, endpoint = values[:6]
    return Envelope(act, flags, number, base, run_id, lineage, name, incarnation, link, endpoint, values[6:], small)

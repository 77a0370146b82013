"""The wire between a reward pool and its workers: four bytes of length (big endian) and JSON, over a socket pair."""

import json
import os
import struct
import sys
from typing import Any, BinaryIO

from relax.rewards.spec import VerifierSpec

MAX_FRAME = 64 * 2**20
LENGTH = struct.Struct(">I")


def command(fd: int, spec: VerifierSpec) -> list[str]:
    """The command line of a worker that inherits `fd`."""
    return [sys.executable, "-m", "relax.rewards.worker", str(fd), str(os.getpid()), spec.to_json()]


def encode(message: dict[str, Any]) -> bytes:
    """A frame. JSON, not msgpack: rows may hold integers beyond 64 bits and lone surrogates."""
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a reward frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame, None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return json.loads(stream.read(*LENGTH.unpack(header)))

"""Checkpoints of a run: parts of several services, complete as a whole or not there at all."""

from relax.checkpoints.directory import Checkpoint, CheckpointDirectory, Writing, read_checkpoint, read_marker
from relax.checkpoints.errors import CheckpointError, NoRoomError

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointError",
    "NoRoomError",
    "Writing",
    "read_checkpoint",
    "read_marker",
]

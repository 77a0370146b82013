"""What a checkpoint can fail of."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written or used; the text names the file, what was found and what was expected."""


class NoRoomError(CheckpointError):
    """The disk has less room than a checkpoint needs; nothing was written."""

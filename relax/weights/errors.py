"""What can be wrong with a set of weights, one class per thing a caller may want to act on."""


class WeightError(Exception):
    """A set of weights was refused. The message names the set, what was seen and what to change."""


class NameMismatch(WeightError):
    """The tensors of a set are not the ones the model has: some are missing, unexpected or of another shape."""


class DigestMismatch(WeightError):
    """Bytes do not hash to the digest their manifest states."""


class NoRoom(WeightError):
    """The file system that backs the store cannot hold two versions of the weights."""


class StoreBusy(WeightError):
    """Readers kept a version locked for longer than the writer may wait."""


class NotStored(WeightError):
    """This node's store does not hold the set asked for."""


class Superseded(NotStored):
    """Both places of the store already hold newer versions: load the newest instead."""

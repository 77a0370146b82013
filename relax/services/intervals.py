"""Which reference a batch is compared with; relax/services/reference.py says why it is there in time."""


def reference_version(batch: int, interval: int | None) -> int:
    """The version of the policy that is the reference of `batch`: the newest that `interval`, --ref-update-interval,
    divides. 0 is --ref-load."""
    return 0 if interval is None else batch // interval * interval

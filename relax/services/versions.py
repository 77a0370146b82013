"""Which tokens of a group may be trained, by the versions that sampled them; and the version that its deadline is
counted from."""

from typing import Any

import numpy as np

from relax.protocol.tensors import SampledGroup


def trainable(runs: np.ndarray, options: Any) -> np.ndarray:
    """Whether the tokens of each run may be trained, bool [R], of version runs int64 [R, 3] (sample, version, tokens).

    With `--mask-offpolicy-in-partial-rollout` only those of the sample's newest version. That is not always the last
    run: a parked sample may go on at a replica that is behind.
    """
    if not options.mask_offpolicy_in_partial_rollout or not len(runs):
        return np.ones(len(runs), bool)
    sample, version = runs[:, 0], runs[:, 1]
    newest = np.full(int(sample.max()) + 1, -1, np.int64)
    np.maximum.at(newest, sample, version)
    return np.asarray(version == newest[sample])


def oldest_version(group: SampledGroup, options: Any) -> int | None:
    """The oldest version that sampled any token which may be trained; None of a group without tokens.

    For a parked group it holds whatever its samples add: they only get a newer newest version, or one more run that is
    reported in its turn.
    """
    versions = group.runs[trainable(group.runs, options), 1]
    return int(versions.min()) if len(versions) else None

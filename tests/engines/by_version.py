"""What each version of the weights says of a sample that several of them sampled."""

import copy
from collections.abc import Mapping
from typing import Any

import models
import numpy as np
from conftest import Rig

TOLERANCE = 1e-4


class Versions(dict[int, Any]):
    """version -> the model as it was; the rig's present one from the start."""

    def __init__(self, rig: Rig) -> None:
        super().__init__({rig.version: copy.deepcopy(rig.model)})
        self.rig = rig

    def publish(self, seed: int) -> Any:
        manifest = self.rig.publish(seed)
        self[manifest.tag.version] = copy.deepcopy(self.rig.model)
        return manifest


def check(
    versions: Mapping[int, Any],
    prompt: np.ndarray,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    runs: list[tuple[int, int]],
) -> None:
    """Each run's log-probs are those of its version, which has read everything before; and of no other version."""
    assert sum(n for _, n in runs) == len(tokens) == len(logprobs)
    expected = {v: models.reference_logprobs(m, prompt, tokens).numpy() for v, m in versions.items()}
    at = 0
    for version, n in runs:
        part = slice(at, at + n)
        assert np.abs(expected[version] - logprobs)[part].max() < TOLERANCE
        for other in versions.keys() - {version}:
            # The models are far apart: a token or two may agree by chance, a run of some length does not.
            assert n < 5 or np.abs(expected[other] - logprobs)[part].max() > 100 * TOLERANCE
        at += n

"""What is said at the start about how far rollout may run ahead, and which limit it meets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from relax.config.resolve import resolve
from relax.launch.plan import bounds

STALE = {"max_staleness": 8, "use_tis": True}


def said(folder: Path, replicas: int = 1, **options: Any) -> str:
    services: dict[str, Any] = {role: {} for role in ("controller", "reward", "advantages", "actor")}
    file = folder / "topology.yaml"
    given = {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "rollout_max_num_seqs": 64} | options
    file.write_text(yaml.safe_dump({"services": services | {"rollout": {"replicas": replicas}}, "options": given}))
    return bounds(resolve({}, file))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "lockstep; 4 groups (32 samples) of the version in training are sampled for each batch"),
        (
            {"over_sampling_batch_size": 6},
            "lockstep; 6 groups (48 samples) of the version in training are sampled for each batch",
        ),
        (
            STALE | {"replicas": 2},
            "asynchronous; staleness at most 8, rollout at most 2 batches ahead: 12 groups (96 samples) in flight",
        ),
        (
            STALE | {"rollout_lead": 5, "replicas": 2},
            "asynchronous; staleness at most 8, rollout at most 5 batches ahead: 24 groups (192 samples) in flight, "
            "of which the replicas sample 16 at once (--rollout-credit)",
        ),
    ],
    ids=["lockstep", "spares", "lead", "credit"],
)
def test_the_limit_that_binds_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    assert said(tmp_path, **options) == text

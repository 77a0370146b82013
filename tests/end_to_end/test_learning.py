"""Every algorithm learns the demo's task through the whole pipeline."""

import sys
from pathlib import Path

import pytest
import tiny_run

sys.path.insert(0, str(tiny_run.ROOT / "benchmarks"))
from learning import ALGORITHMS, SEEDS, gain, learn


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reward_rises(algorithm: str, seed: int, tmp_path: Path) -> None:
    start, end = gain(learn(algorithm, seed, tmp_path / "run"))
    assert end >= start + 0.15

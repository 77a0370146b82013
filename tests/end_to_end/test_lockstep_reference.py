"""A lockstep run computes what a loop in one process does, to the bit: 20 batches, and the weights after each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny_run
from reference_mutants import WRONG

from relax.weights.manifest import Manifest
from relax.weights.publication import manifest_path

# Two processes with an engine each, one after the other.
pytestmark = pytest.mark.timeout(2 * tiny_run.PATIENCE)

Rows = list[dict[str, Any]]
HERE = Path(__file__).parent
# What the loop reports beside the numbers of metrics.jsonl.
SEEN = {"digest", "versions", "responses"}
# They must be among the numbers that are compared.
NUMBERS = {"batch", "rollout/raw_reward", "train/loss", "train/grad_norm", "train/entropy", "train/mismatch_kl"}

LONG: dict[str, dict[str, Any]] = {
    "one_step": {},
    "rloo": {"advantage_estimator": "rloo", "calculate_per_token_loss": True},
    # More samples than the engine takes at once, micro-batches that do not divide a step, a tail that is cut off.
    "crowded": {
        "rollout_batch_size": 8,
        "rollout_max_num_seqs": 16,
        "rollout_max_response_len": 48,
        "rollout_top_p": 0.9,
        "micro_batch_size": 5,
    },
}


def alone(script: str, run: tiny_run.Run) -> str:
    """What a script prints for the run's topology, in a process of its own with one thread, as a service has it."""
    command = [sys.executable, HERE / script, run.directory / "topology.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=tiny_run.PATIENCE, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def loops(lockstep: tiny_run.Run) -> dict[str, Rows]:
    """The reference loop on the seed of the lockstep run, and its mutants."""
    assert lockstep.code == 0, lockstep.output
    return json.loads(alone("reference_mutants.py", lockstep))


@pytest.fixture(scope="module")
def reference(loops: dict[str, Rows]) -> Rows:
    return loops["ReferenceLoop"]


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in SEEN}


def digests(run: tiny_run.Run) -> list[str]:
    """Of the weights of every version, those after the last batch too."""
    versions = range(len(run.rows) + 1)
    return [Manifest.load(manifest_path(run.directory / "weights", 0, version)).tag.digest for version in versions]


def samples(run: tiny_run.Run, batch: int) -> Rows:
    """In the order in which they are trained."""
    rows = pq.read_table(run.directory / "samples" / f"{batch:06d}.parquet").to_pylist()
    return sorted(rows, key=lambda row: (row["group"], row["sample"]))


def assert_equal(run: tiny_run.Run, reference: Rows) -> None:
    assert len(run.rows) == len(reference) == 20
    published = digests(run)
    assert len(set(published)) == 21, "weights that do not change would agree trivially"
    for b, (ours, theirs) in enumerate(zip(run.rows, reference, strict=True)):
        expected = numbers(theirs)
        assert expected.keys() >= NUMBERS
        assert {name: ours.get(name) for name in expected} == expected
        assert published[b] == theirs["digest"]
        trained = samples(run, b)
        assert [row["response"] for row in trained] == theirs["responses"]
        assert all(row["versions"] == [[b, row["response_len"]]] for row in trained), "a token of another version"
        assert theirs["versions"] == [b]
    for name in NUMBERS:
        assert len({row[name] for row in reference}) > 10, f"{name} hardly depends on what is trained"


def test_twenty_lockstep_batches_equal_the_reference_loop(lockstep: tiny_run.Run, reference: Rows) -> None:
    assert_equal(lockstep, reference)


@pytest.mark.parametrize(
    ("mutant", "first"), [("LosesAnUpdate", 0), ("SamplesOneVersionBehind", 0), ("TrainsInAnotherOrder", 1)]
)
def test_one_wrong_batch_would_be_seen(loops: dict[str, Rows], reference: Rows, mutant: str, first: int) -> None:
    """Equal up to the wrong batch; other numbers from there on, or from the next batch where only the order is wrong
    (the sums of the batch itself may come out alike)."""
    rows = loops[mutant]
    assert rows[:WRONG] == reference[:WRONG]
    for row, right in list(zip(rows, reference, strict=False))[WRONG + first :]:
        assert numbers(row) != numbers(right)
    after = rows[WRONG + 1]
    assert after["digest"] != reference[WRONG + 1]["digest"]


def test_what_is_sampled_depends_on_the_last_update(loops: dict[str, Rows], reference: Rows) -> None:
    """One version behind, other responses: a replica that serves old weights cannot hide behind equal samples."""
    behind = loops["SamplesOneVersionBehind"][WRONG]
    assert behind["versions"] == [WRONG - 1]
    assert behind["responses"] != reference[WRONG]["responses"]


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_other_lockstep_runs_equal_the_reference_loop(name: str, tmp_path: Path) -> None:
    run = tiny_run.launch(tmp_path, num_rollout=20, rollout_temperature=0.7, **LONG[name])
    assert run.code == 0, run.output
    assert_equal(run, [json.loads(line) for line in alone("reference_loop.py", run).splitlines()])

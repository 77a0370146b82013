"""Two and four ranks through torchrun give what one rank gives: log-probs, values, losses, gradients, weights, exports;
alone and led by rank 0 through commands."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relax.services.actor_work import ActorWork
from relax.services.critic_work import CriticWork
from relax.services.reference_work import ReferenceWork
from tests.megatron import grid_worker, tiny

ROOT = Path(__file__).parents[2]
TWO = ["tensor", "tensor-tied", "tensor-bias", "sequence", "pipeline", "pipeline-tied", "context", "data", "data-idle"]
TWO += ["critic-tensor", "critic-sequence", "critic-pipeline", "critic-context", "critic-data"]
FOUR = ["tensor-data", "tensor-pipeline", "critic-tensor-pipeline", "context-tensor-sequence"]


def torchrun(ranks: int, output: Path, cases: list[str]) -> None:
    for kind in {grid_worker.CASES[case][0] for case in cases}:
        tiny.save(output / kind, kind)
    tiny.save(output / "other", "qwen3", seed=5)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "tests.megatron.grid_worker"]
    done = subprocess.run(
        [*command, str(output), *cases],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("two-ranks")
    torchrun(2, output, TWO)
    return output


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("four-ranks")
    torchrun(4, output, FOUR)
    return output


def assert_equal_to_one_rank(output: Path, case: str) -> None:
    kind, _, samples = grid_worker.CASES[case]
    seen = torch.load(output / f"{case}.pt", weights_only=False)
    expected = grid_worker.observe(grid_worker.learner(case, {}, output / kind), grid_worker.recorded(samples))
    for got, want in zip(seen["forward"], expected["forward"], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert seen["gradients"].keys() == expected["gradients"].keys()
    for name, want in expected["gradients"].items():
        torch.testing.assert_close(seen["gradients"][name], want, atol=2e-6, rtol=1e-4, msg=name)
    for (loss, norm, metrics), (want_loss, want_norm, want_metrics) in zip(
        seen["steps"], expected["steps"], strict=True
    ):
        assert loss == pytest.approx(want_loss, abs=1e-4)
        assert norm == pytest.approx(want_norm, rel=1e-3)
        assert metrics.keys() == want_metrics.keys()
        # Counts show a sample that one grid would see twice, or not at all.
        assert metrics["tokens"][0] == want_metrics["tokens"][0]
        for name, pair in want_metrics.items():
            assert metrics[name] == pytest.approx(pair, rel=1e-3, abs=1e-4)
    assert seen["weights"].keys() == expected["weights"].keys()
    for name, want in expected["weights"].items():
        # Adam divides by the gradient's size, so where it is nearly 0 the sign decides: lr x steps is the bound.
        assert (seen["weights"][name] - want).abs().mean() < 1e-5, name
    if "reference" in seen:
        exported = load_file(output / f"export-{case}" / "model.safetensors")
        assert exported.keys() == seen["weights"].keys()
        assert all(torch.equal(exported[name], seen["weights"][name]) for name in exported)
        reference = seen["reference"]
        assert not np.array_equal(reference["before"], reference["refreshed"])
        assert np.array_equal(reference["refreshed"], reference["fresh"])


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_equal_one(case, two_ranks):
    assert_equal_to_one_rank(two_ranks, case)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_equal_one(case, four_ranks):
    assert_equal_to_one_rank(four_ranks, case)


def test_two_ranks_led_by_commands_give_what_one_rank_gives(two_ranks):
    seen, options = torch.load(two_ranks / "led.pt", weights_only=False), grid_worker.work_options(two_ranks)
    actor = ActorWork(options, 4)
    assert_metrics_equal(seen["train"], actor.train(tiny.batch(3)))
    exported = load_file(two_ranks / "export-led" / "model.safetensors")
    for name, want in actor.policy.state():
        assert (seen["weights"][name] - want).abs().mean() < 1e-5, name
        assert torch.equal(seen["weights"][name], exported[name])
    critic = CriticWork(options, None)
    np.testing.assert_allclose(seen["values"], critic.values(tiny.batch(4)), atol=1e-5)
    assert_metrics_equal(seen["train_values"], critic.train(grid_worker.value_batch()))
    np.testing.assert_allclose(seen["values_after"], critic.values(tiny.batch(4)), atol=1e-3)
    assert np.abs(seen["values_after"] - seen["values"]).max() > 0.01
    reference = ReferenceWork(options)
    np.testing.assert_allclose(seen["logprobs"], reference.logprobs(tiny.batch(4)), atol=1e-5)
    fresh = ReferenceWork(options.model_copy(update={"ref_load": two_ranks / "other"}))
    np.testing.assert_allclose(seen["refreshed"], fresh.logprobs(tiny.batch(4)), atol=1e-5)


def test_weights_read_beside_training_are_those_that_were_staged(two_ranks):
    """Bit for bit what a read at rest gives, though batches are trained while the ranks gather them."""
    seen = torch.load(two_ranks / "led.pt", weights_only=False)["beside"]
    assert seen["steps"] >= len(seen["beside"]) == 4
    for rest, beside in zip(seen["at_rest"], seen["beside"], strict=True):
        assert list(rest) == list(beside)
        assert all(torch.equal(rest[name], beside[name]) for name in rest)
    for older, newer in pairwise(seen["at_rest"]):
        assert not any(torch.equal(older[name], newer[name]) for name in older), "training did not move the weights"


def assert_metrics_equal(seen, expected):
    assert seen.keys() == expected.keys()
    for name, (kind, value, count) in expected.items():
        assert seen[name][0] == kind
        assert seen[name][1:] == pytest.approx((value, count), rel=1e-3, abs=1e-4), name


def test_ranks_exchange_headers_arrays_and_metrics(two_ranks):
    told = json.loads((two_ranks / "exchange.json").read_text())
    assert told == {
        "header": {"batch": 3},
        "a": [0, 1, 2, 3, 4],
        "b": [0, 3],
        "sums": {"all": [2.0, 4.0], "rank0": [0.5, 1.0], "rank1": [0.5, 1.0]},
    }


def test_sizes_that_do_not_divide_the_ranks_are_refused_on_every_rank(two_ranks):
    for rank in range(2):
        text = (two_ranks / f"refused-{rank}").read_text()
        assert "3 processes hold one model, which does not divide the 2 processes" in text

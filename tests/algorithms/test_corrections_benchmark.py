"""benchmarks/corrections.py: its runs are legal and differ in what they are compared for; its results go on."""

import json
import sys
from pathlib import Path

import pytest

from relax.config.checks import check_options
from relax.config.resolve import Resolved, resolve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import corrections  # noqa: E402


def resolved(arm: str) -> Resolved:
    return resolve(corrections.COMMON | corrections.ARMS[arm][1], ROOT / "examples" / "demo" / "demo.yaml")


@pytest.mark.parametrize("arm", corrections.ARMS)
def test_every_arm_is_a_legal_run_with_samples_sixteen_versions_old(arm: str) -> None:
    run = resolved(arm)
    assert not run.violations and check_options(run) == []
    assert (run.options.max_staleness, run.options.rollout_lead) == (16, 16)


def test_arms_differ_only_in_algorithm_and_correction() -> None:
    of = {arm: resolved(arm).options.model_dump() for arm in corrections.ARMS}
    differs = {name for name in of["grpo"] if len({repr(options[name]) for options in of.values()}) > 1}
    named = {"advantage_estimator", "use_tis", "use_rollout_logprobs", "no_off_policy_correction"}
    # eps_clip belongs to GRPO alone, m2po_* to M2PO.
    assert differs == named | {"eps_clip_high", *corrections.M2PO}


def curves(start: float, end: float) -> dict[str, list[float]]:
    reward = [start] * 3 + [0.5] * 67 + [end] * 10
    return {"reward": reward} | {name: [0.25] * 80 for name in ("clip_fraction", "staleness", "kl", "entropy")}


def test_results_go_on_under_the_same_options_and_under_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections, "RESULTS", tmp_path / "corrections.json")
    assert corrections.load(80) == {}
    kept = {"grpo": {"1": curves(0.1, 0.9)}}
    corrections.save(80, kept)
    assert corrections.load(80) == kept
    row = corrections.table(kept).splitlines()[-1]
    assert row.startswith("| GRPO, no correction | 1 | 0.10 |") and "| 0.90 |" in row
    for batches, common in ((60, {}), (80, {"lr": 1.0})):
        monkeypatch.setattr(corrections, "COMMON", corrections.COMMON | common)
        with pytest.raises(SystemExit, match="other options"):
            corrections.load(batches)


def test_the_kept_results_are_those_of_the_script() -> None:
    if corrections.RESULTS.is_file():
        kept = json.loads(corrections.RESULTS.read_text())
        results = corrections.load(kept["options"]["num_rollout"])
        seeds = {str(seed) for seed in corrections.SEEDS}
        assert results.keys() == corrections.ARMS.keys() and all(set(runs) == seeds for runs in results.values())

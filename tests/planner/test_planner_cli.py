"""relax-simulate from the command line: a table, a picture, a recommendation; refusals before anything is planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax.planner.cli import main

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = str(ROOT / "topologies" / "simulated.yaml")
FEW = ("--num-rollout", "6", "--rollout-batch-size", "8", "--sim-slots", "4")
MEASURED = ("--sim-length", "lognormal:20,0.5", "--sim-tokens-per-second", "100", "--sim-train-seconds", "0.2")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def vllm_topology(folder: Path, **options: Any) -> str:
    services = {role: {} for role in ("controller", "reward", "advantages", "actor")} | {"rollout": {"replicas": 2}}
    base = {"hf_checkpoint": "not/here", "prompt_data": "not/here.jsonl", "rm_type": "exact_match", "lr": 1e-5}
    path = folder / "topology.yaml"
    path.write_text(yaml.safe_dump({"services": services, "options": base | {"num_rollout": 5} | options}))
    return str(path)


def test_it_prints_a_table_a_recommendation_and_its_rule_and_writes_plot_and_json(tmp_path: Path, capsys) -> None:
    plot, record = tmp_path / "plan.png", tmp_path / "plan.json"
    argv = [SIMULATED, *FEW, "--sweep-staleness", "0,1,3", "--plot", str(plot), "--json", str(record)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and "planned in" not in line]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["3", "2"]]
    assert "Recommended: --max-staleness" in out and "the least staleness, then the least lead, within 5%" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    plans = json.loads(record.read_text())
    assert [plan["setting"]["max_staleness"] for plan in plans["settings"]] == [0, 1, 3]
    assert all(plan["batches"] == 6 and plan["groups"] == 48 for plan in plans["settings"])


def test_without_a_sweep_the_usual_bounds_and_that_of_the_run_are_planned(capsys) -> None:
    assert main([SIMULATED, *FEW, "--max-staleness", "3"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and "planned in" not in line]
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3, 4, 8]
    assert "this run" in next(line for line in out.splitlines() if line.startswith("3 "))


def test_leads_are_swept_up_to_the_bound(capsys) -> None:
    assert main([SIMULATED, *FEW, "--sweep-staleness", "0,2", "--sweep-lead", "0,1,4"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert rows[:4] == [["0", "0"], ["2", "0"], ["2", "1"], ["2", "2"]]


def test_one_setting_is_planned_and_none_is_recommended(capsys) -> None:
    assert main([SIMULATED, *FEW, "--sweep-staleness", "2"]) == 0
    out = capsys.readouterr().out
    assert "ecommended" not in out and "Groups by staleness: 0:" in out


def test_bounds_that_make_no_run_are_left_out_and_named(capsys) -> None:
    assert main([SIMULATED, *FEW, "--update-weights-interval", "2"]) == 0
    assert "S = 0, L = 0 is left out: --update-weights-interval 2 needs" in capsys.readouterr().out


def test_a_sweep_goes_without_what_cannot_act_at_a_bound_and_says_so(capsys) -> None:
    assert main([SIMULATED, *FEW, "--partial-rollout", "--sweep-staleness", "0,2"]) == 0
    assert "S = 0 is planned without --partial-rollout" in capsys.readouterr().out
    assert main([SIMULATED, *FEW, "--max-staleness=0", "--over-sampling-batch-size=12", "--sweep-staleness=0,1"]) == 0
    out = capsys.readouterr().out
    assert "draws: 24 surplus;" in out and "S > 0 is planned without --over-sampling-batch-size" in out


def test_a_straggler_timeout_of_zero_is_left_out_where_nothing_could_be_told_apart(capsys) -> None:
    flags = ("--straggler-timeout", "0", "--sweep-staleness", "0,2")
    assert main([SIMULATED, *FEW, *flags]) == 0
    assert "L = 0 is planned without --straggler-timeout 0" in capsys.readouterr().out


def test_a_run_with_real_engines_is_planned_without_its_data_and_checkpoint(tmp_path: Path, capsys) -> None:
    assert main([vllm_topology(tmp_path), *MEASURED, "--prompts", "50"]) == 0
    assert "2 replicas x 64 slots" in capsys.readouterr().out


def test_a_run_on_several_hosts_is_planned_without_its_keys(capsys) -> None:
    argv = [str(ROOT / "topologies" / "two-nodes.yaml"), *MEASURED, "--num-rollout", "3", "--prompts", "50"]
    assert main(argv) == 0
    assert "replicas x" in capsys.readouterr().out


def refused(capsys, *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_what_nobody_measured_is_asked_for(tmp_path: Path, capsys) -> None:
    told = refused(capsys, vllm_topology(tmp_path), "--prompts", "50", *MEASURED[2:])
    assert "--sim-length" in told and "--sim-train-seconds" not in told


def test_prompts_that_are_not_at_hand_are_asked_for(tmp_path: Path, capsys) -> None:
    assert "--prompts N" in refused(capsys, vllm_topology(tmp_path), *MEASURED)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep-staleness", "1,x"], "--sweep-staleness = '1,x' (from flag): is not a list of whole numbers"),
        (["--sweep-lead", "-1"], "--sweep-lead = '-1' (from flag): is not a list of whole numbers"),
        (["--prompts", "0"], "--prompts = '0' (from flag): is not a whole number above 0"),
        (["--hop-seconds", "-1"], "out of range. Give a number of at least 0"),
        (["--load-seconds", "nan"], "out of range. Give a number of at least 0"),
        (["--score-seconds", "soon"], "is not a number"),
        (["--within", "1"], "at least 0 and below 1"),
        (["--plot", "plan.txt"], "is no kind of picture"),
        (["--plot", "no/such/place/plan.png"], "its directory does not exist"),
        (["--json", "no/such/place/plan.json"], "its directory does not exist"),
        (["--json", "topologies"], "is a directory"),
        (["--sim-length", "lognormal:5"], "has 1 numbers after the colon"),
        (["--sim-tokens-per-second", "100,fast"], "'fast' is no speed"),
        (["--max-stalenes", "3"], "Did you mean --max-staleness?"),
        (["--rollout-lead", "9"], "--max-staleness is 2"),
    ],
)
def test_bad_input_is_refused_with_what_to_change(capsys, flags: list[str], told: str) -> None:
    assert told in refused(capsys, SIMULATED, *flags)


def test_every_fault_is_told_at_once(capsys) -> None:
    flags = (
        "--within=2",
        "--hop-seconds=-1",
        "--plot=no/plan.png",
        "--num-rollout=0",
        "--sim-length=long",
        "--sweeps=1",
    )
    told = refused(capsys, SIMULATED, *flags)
    assert told.startswith("refused, for 6 reasons:") and "(from flag)" in told.partition("--sim-length")[2]


def test_a_sweep_in_which_nothing_makes_a_run_is_refused(capsys) -> None:
    told = refused(capsys, SIMULATED, *FEW, "--update-weights-interval", "2", "--sweep-staleness", "0")
    assert "--update-weights-interval 2 needs" in told


def test_a_timeout_that_lets_nothing_through_is_refused(capsys) -> None:
    flags = ("--straggler-timeout", "0.01", "--sim-length", "constant:100", "--sweep-staleness", "0")
    assert "in a row were too slow for --straggler-timeout" in refused(capsys, SIMULATED, *FEW, *flags)

"""Which checkpoint a new run is loaded from, and which it refuses, before anything starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax.checkpoints import CheckpointDirectory
from relax.checkpoints.model_state import ModelState
from relax.config.flags import Parser
from relax.config.violation import ConfigError
from relax.launch.accept import Accepted, accept
from relax.launch.cli import main
from relax.launch.load import check_marked
from relax.launch.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "topologies" / "tiny"
ONE_RANK = {"world": 1, "tensor": 1, "pipeline": 1, "context": 1, "data": 1, "sequence_parallel": False}
ARCHITECTURE = {
    "model_type": "qwen3", "layers": 2, "hidden": 64, "heads": 2, "query_groups": 2, "head_dim": 32, "ffn": 192,
    "vocab": 100, "tied": True,
}  # fmt: skip
ACTOR = ModelState("LanguageNetwork", ARCHITECTURE, "float32", ONE_RANK, 3, 0, 3)
OPTIONS: dict[str, Any] = {
    "hf_checkpoint": str(TINY),
    "prompt_data": "reasoning_gym:spell_backward",
    "rm_type": "reasoning_gym",
    "num_rollout": 3,
    "rollout_batch_size": 4,
    "rollout_max_prompt_len": 256,
    "rollout_max_response_len": 16,
    "ref_load": None,
}
PPO = {"advantage_estimator": "ppo"}
REFRESHED = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(TINY), "ref_update_interval": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """One that has ended."""
    run = RunDir.create(tmp_path / "before")
    run.leave()
    return run


def save(run: RunDir, batch: int, **states: ModelState) -> Path:
    """A checkpoint with these models' parts, which hold no more than what they say of themselves."""
    directory = CheckpointDirectory(run.checkpoints_dir)
    writing = directory.begin(batch)
    for role, state in states.items():
        writing.part(role).mkdir()
        state.write(writing.part(role))
        writing.close_part(role)
    return directory.complete(writing, parts=states, run_id=run.run_id, lineage=0).path


def asked(folder: Path, *flags: str, services: dict[str, Any] | None = None, **options: Any) -> Accepted:
    roles = {role: {} for role in ("controller", "rollout", "reward", "advantages", "actor")} | (services or {})
    wanted = {name: value for name, value in (OPTIONS | options).items() if value is not None}
    (folder / "topology.yaml").write_text(
        yaml.safe_dump({"run": {"directory": str(folder / "runs")}, "services": roles, "options": wanted})
    )
    parser = Parser("relax-launch", "")
    parser.add_argument("topology", type=Path)
    parser.add_argument("--node")
    return accept(parser.parse([str(folder / "topology.yaml"), *flags]))


def refused(folder: Path, *flags: str, **kinds: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        asked(folder, *flags, **kinds)
    assert not (folder / "runs").exists()
    return [str(violation) for violation in error.value.violations]


def test_a_run_begins_with_a_checkpoint_or_with_the_newest_of_a_run(tmp_path: Path, run: RunDir) -> None:
    older, newest = save(run, 2, actor=ACTOR), save(run, 4, actor=ACTOR)
    one = asked(tmp_path, "--load", str(older))
    assert one.resolved.options.load == older and one.given.options["load"] == str(older)
    (line,) = one.begins()
    assert line.startswith(f"load: {older} of ") and "weights, optimizer, random generators of actor; steps" in line
    two = asked(tmp_path, load=str(run.path))
    assert two.resolved.options.load == newest and two.given.options == {"load": str(newest)}
    assert yaml.safe_load(two.resolved.config_yaml())["load"] == str(newest), "every life knows which it was"
    (newest / "actor" / "state.json").write_text("{")
    assert asked(tmp_path, "--load", str(run.path)).resolved.options.load == older
    moved = older.rename(tmp_path / "my checkpoint")
    assert asked(tmp_path, "--load", str(moved)).origin is not None
    (line,) = asked(tmp_path, "--load", str(moved), "--no-load-optim", "--no-load-rng").begins()
    assert "weights of actor; steps" in line


def test_what_is_no_checkpoint_is_refused_with_what_to_name(tmp_path: Path, run: RunDir) -> None:
    path = save(run, 2, actor=ACTOR)
    cases = [
        (tmp_path / "nowhere", "does not exist; relative paths start at"),
        (run.config, "is a file"),
        (TINY, "It looks like a Hugging Face model: begin with it by --hf-checkpoint."),
        (run.checkpoints_dir, f"Name one of those in it: {path}."),
        (path / "actor", "it has no complete.json"),
    ]
    for given, told in cases:
        (reason,) = refused(tmp_path, "--load", str(given))
        assert reason.startswith(f"--load = {str(given)!r}") and told in reason, reason
    (path / "actor" / "state.json").write_text("{")
    (reason,) = refused(tmp_path, "--load", str(path))
    assert "state.json has 1 bytes" in reason
    (path / "complete.json").unlink()
    assert "its writing did not end" in refused(tmp_path, "--load", str(path))[0]
    assert "holds no complete checkpoint" in refused(tmp_path, "--load", str(run.path))[0]


def test_another_model_dtype_or_grid_is_refused_before_anything_starts(tmp_path: Path, run: RunDir) -> None:
    path = save(run, 2, actor=replace(ACTOR, architecture=ARCHITECTURE | {"layers": 4}))
    (reason,) = refused(tmp_path, "--load", str(path))
    assert f"its actor is of another model: num_hidden_layers is 4, and 2 in --hf-checkpoint {TINY}" in reason
    path = save(run, 3, actor=replace(ACTOR, dtype="bfloat16"))
    (reason,) = refused(tmp_path, "--load", str(path))
    assert reason.startswith("--train-dtype = 'float32'") and "Give --train-dtype bfloat16." in reason
    two = ONE_RANK | {"world": 2, "data": 2}
    path = save(run, 4, actor=replace(ACTOR, grid=two))
    (reason,) = refused(tmp_path, "--load", str(path))
    assert "its actor was on 2 ranks (data 2), here it is on 1 rank, and random generators" in reason
    assert asked(tmp_path, "--load", str(path), "--no-load-rng").origin is not None
    assert asked(tmp_path, "--load", str(path), services={"actor": {"ranks": 2}}).origin is not None
    path = save(run, 5, ledger=ACTOR)
    assert "has no part 'actor'; it has ledger" in refused(tmp_path, "--load", str(path))[0]


def test_critic_and_reference_are_taken_over_where_both_runs_have_them(tmp_path: Path, run: RunDir) -> None:
    alone, both = save(run, 2, actor=ACTOR), save(run, 4, actor=ACTOR, critic=ACTOR, reference=ACTOR)
    critic = {"services": {"critic": {}}, **PPO}
    (reason,) = refused(tmp_path, "--load", str(alone), **critic)
    assert "has no part 'critic'; it has actor" in reason and "export/ of its run as --hf-checkpoint" in reason
    origin = asked(tmp_path, "--load", str(both), **critic).origin
    assert origin is not None and origin.models == ("actor", "critic") and "its reference is not used" in str(origin)
    origin = asked(tmp_path, "--load", str(both)).origin
    assert origin is not None and "its critic and reference is not used" in str(origin)
    kl = {"services": {"reference": {}}, **REFRESHED}
    for path, models in ((alone, ("actor",)), (both, ("actor", "reference"))):
        origin = asked(tmp_path, "--load", str(path), **kl).origin
        assert origin is not None and origin.models == models


def test_a_simulated_run_has_no_model_to_load(tmp_path: Path, run: RunDir) -> None:
    path = save(run, 2, actor=ACTOR)
    kinds: dict[str, Any] = {"services": {"rollout": {"engine": "simulated"}, "actor": {"engine": "simulated"}}}
    kinds |= {"rm_type": None, "custom_rm_path": "relax.simulation.reward:coin"}
    reasons = refused(tmp_path, "--load", str(path), "--no-load-optim", **kinds)
    assert [reason.split()[0] for reason in reasons] == ["--load", "--no-load-optim"]
    assert reasons[0].startswith(f"--load = {str(path)!r} ")
    assert all("the engines are simulated, so there is no model" in reason for reason in reasons)


def test_on_several_hosts_the_checkpoint_itself_is_named(tmp_path: Path, run: RunDir) -> None:
    path = save(run, 2, actor=ACTOR)
    nodes = {"left": {"address": "10.0.0.1"}, "right": {"address": "10.0.0.2"}}
    services: dict[str, Any] = {role: {"node": "left"} for role in ("controller", "rollout", "advantages", "actor")}
    document = {
        "nodes": nodes, "controller": "tcp://10.0.0.1:5755", "services": services | {"reward": {"node": "right"}},
        "run": {"directory": str(tmp_path / "runs")},
        "options": {name: value for name, value in OPTIONS.items() if value is not None} | {"insecure": True},
    }  # fmt: skip
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(document))
    parser = Parser("relax-launch", "")
    parser.add_argument("topology", type=Path)
    parser.add_argument("--node")

    def on(node: str, load: Path) -> Accepted:
        return accept(parser.parse([str(tmp_path / "hosts.yaml"), "--node", node, "--load", str(load)]))

    with pytest.raises(ConfigError, match=r"--load.*its newest checkpoint may be another one on each host"):
        on("right", run.path)
    assert on("left", path).origin is not None
    away = on("right", tmp_path / "not on this host")
    assert away.origin is None and away.resolved.options.load == tmp_path / "not on this host"


def test_a_service_by_hand_is_given_the_checkpoint_itself(tmp_path: Path, run: RunDir) -> None:
    path = save(run, 2, actor=ACTOR)
    check_marked(path)
    with pytest.raises(ConfigError, match=r"may be another one for each service.*Name a checkpoint"):
        check_marked(run.path)
    (path / "complete.json").unlink()
    with pytest.raises(ConfigError, match=r"--load.*has no complete.json"):
        check_marked(path)


def test_a_resume_has_the_load_of_its_run_and_reads_it_only_at_batch_0(tmp_path: Path, run: RunDir) -> None:
    path = save(run, 2, actor=ACTOR)
    first = asked(tmp_path, "--load", str(run.path))
    again = RunDir.create(tmp_path / "run", config=first.resolved.config_yaml())
    again.leave()
    resume = ("--resume", str(again.path))
    (reason,) = refused(tmp_path, *resume)
    assert reason.startswith("--load = None") and f"Give --load {path}." in reason
    (reason,) = refused(tmp_path, *resume, "--load", str(tmp_path / "other"))
    assert f"the run that is resumed has {path}" in reason
    accepted = asked(tmp_path, *resume, "--load", str(path))
    assert accepted.origin is not None and [line.split(":")[0] for line in accepted.begins()] == ["resume", "load"]
    own = save(again, 1, actor=ACTOR)
    path.rename(tmp_path / "gone")
    accepted = asked(tmp_path, *resume, "--load", str(path))
    assert accepted.origin is None and f"goes on at batch 1, from {own}" in next(accepted.begins())
    save(again, 2, actor=replace(ACTOR, grid=ONE_RANK | {"world": 2, "data": 2}))
    (reason,) = refused(tmp_path, *resume, "--load", str(path))
    assert reason.startswith("--resume") and "random generators belong to a rank" in reason
    (line,) = asked(tmp_path, *resume, "--load", str(path), "--no-load-rng").begins()
    assert line.endswith("(lineage 1), --no-load-rng")


def test_a_dry_run_says_what_it_would_begin_with(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(run, 2, actor=ACTOR)
    asked(tmp_path, "--load", str(run.path))
    assert main([str(tmp_path / "topology.yaml"), "--load", str(run.path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"\n\nload: {path} of " in out and out.endswith("\n\nNothing was started.\n")
    assert not (tmp_path / "runs").exists() and json.loads((run.path / "runtime.json").read_text())["lineage"] == 0

"""Checkpoints of models: what was saved goes on bit for bit, on one rank and two, while training went on; what is
damaged, missing or of another model is refused by name."""

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from relax.checkpoints import parts
from relax.checkpoints.parts import PartError
from relax.megatron import snapshot
from relax.megatron.checkpoint import CheckpointError
from relax.megatron.critic import Critic
from relax.megatron.policy import Policy
from relax.megatron.snapshot import SaveError, Snapshot
from relax.services.reference_work import ReferenceWork
from tests.megatron import snapshot_worker as worker
from tests.megatron import tiny
from tests.megatron.grid_worker import learner, loss_of

ROOT = Path(__file__).parents[2]
FILES = {"model-00000.safetensors", "optimizer-00000.safetensors", "rng-00000.safetensors", "state.json"}


def assert_equal(seen: dict, expected: dict) -> None:
    assert seen.keys() == expected.keys()
    assert [name for name in seen if not torch.equal(seen[name], expected[name])] == []


# --- one rank --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "qwen3-tied"):
        tiny.save(path / kind, kind)
    tiny.save(path / "wide", "qwen3", intermediate_size=128)
    return path


@pytest.fixture(scope="module")
def saved(models) -> Path:
    """A checkpoint of the policy of qwen3 after three steps; not to be changed."""
    policy = Policy(tiny.options(), models / "qwen3")
    worker.train(policy, worker.BEFORE)
    kept = Snapshot(policy.network, policy)
    kept.take({"batch": 3})
    kept.write(models / "saved")
    return models / "saved"


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """One that may be damaged."""
    return shutil.copytree(saved, tmp_path / "copy")


def fresh(models: Path, kind: str = "qwen3", **changes) -> Policy:
    return Policy(tiny.options(**changes), models / kind)


def load(path: Path, policy: Policy, **switches) -> snapshot.Loaded:
    return snapshot.load(path, policy.network, policy, **switches)


@pytest.mark.parametrize(
    ("made", "kind", "dtype"),
    [(Policy, "qwen3-tied", "float32"), (Policy, "qwen3", "bfloat16"), (Critic, "qwen3", "float32")],
)
def test_a_learner_that_was_loaded_goes_on_bit_for_bit(made, kind, dtype, models, tmp_path):
    first, second = (made(tiny.options(train_dtype=dtype), models / kind) for _ in range(2))
    expected = worker.save(first, tmp_path / "checkpoint")
    parts.verify(tmp_path / "checkpoint")
    seen = worker.load(second, tmp_path / "checkpoint")
    assert_equal(seen["weights"], expected["weights"])
    assert seen["steps"] == expected["steps"]
    assert_equal(seen["weights_after"], expected["weights_after"])
    assert not any(torch.equal(expected["weights"][name], after) for name, after in expected["weights_after"].items())
    assert seen["draws"] == expected["draws"]
    assert (seen["about"], seen["generators"]) == ({"batch": 3}, True)
    assert expected["files"].keys() == FILES


def test_before_the_first_step_and_after_a_skipped_one(models, tmp_path):
    first, second = fresh(models), fresh(models)
    empty = tiny.batch(0) | {"loss_mask": np.zeros_like(tiny.batch(0)["loss_mask"])}
    assert first.train(empty, loss_of(empty)).skipped
    kept = Snapshot(first.network, first)
    kept.take()
    kept.write(tmp_path / "checkpoint")
    assert load(tmp_path / "checkpoint", second).steps == 1
    assert (second.steps, second.skipped_steps) == (1, 1)
    assert worker.train(second, worker.AFTER) == worker.train(first, worker.AFTER)
    assert_equal(worker.weights(second), worker.weights(first))


def test_a_schedule_goes_on_where_it_was(models, tmp_path):
    options = {"lr_decay_style": "linear", "lr_decay_steps": 6, "lr_warmup_steps": 2}
    first, second = fresh(models, **options), fresh(models, **options)
    worker.save(first, tmp_path / "checkpoint")
    load(tmp_path / "checkpoint", second)
    batch = tiny.batch(3)
    assert second.train(batch, loss_of(batch)).lr == second.optimizer.schedule.at(3) < second.optimizer.schedule.at(2)


def test_without_the_optimizer_state_steps_begin_anew(saved, copy, models):
    (copy / "optimizer-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer-00000.safetensors is missing; --no-load-optim goes on"):
        load(copy, fresh(models))
    policy, whole = fresh(models), fresh(models)
    worker.train(policy, range(2))  # its moments are forgotten
    assert load(copy, policy, optimizer=False) == snapshot.Loaded({"batch": 3}, 0, optimizer=False, generators=True)
    load(saved, whole)
    assert_equal(worker.weights(policy), worker.weights(whole))
    (loss, norm, step), (loss_whole, norm_whole, step_whole) = (worker.train(p, range(1))[0] for p in (policy, whole))
    assert (loss, norm, step) == (loss_whole, norm_whole, 0)
    assert step_whole == 3
    assert not torch.equal(dict(policy.state())["lm_head.weight"], dict(whole.state())["lm_head.weight"])


def test_a_new_run_takes_the_moments_and_begins_its_own_schedule(saved, models):
    options = {"lr_decay_style": "linear", "lr_decay_steps": 6, "lr_warmup_steps": 2}
    policy, whole = fresh(models, **options), fresh(models)
    worker.train(policy, range(1))
    assert load(saved, policy, steps=False) == snapshot.Loaded({"batch": 3}, 0, optimizer=True, generators=True)
    load(saved, whole)
    assert (policy.steps, policy.skipped_steps, policy.optimizer.updates) == (0, 0, 3) and whole.steps == 3
    before, batch, norm = worker.weights(policy), tiny.batch(3), "model.norm.weight"
    first, fourth = policy.train(batch, loss_of(batch)), whole.train(batch, loss_of(batch))
    assert (first.step, first.lr) == (0, policy.optimizer.schedule.at(0)) and first.lr < fourth.lr
    assert (first.loss, first.grad_norm) == (fourth.loss, fourth.grad_norm)
    # A weight without decay moves by the rate times what the moments say, which are those of the checkpoint.
    ours, theirs = (worker.weights(p)[norm] - before[norm] for p in (policy, whole))
    assert torch.allclose(ours / first.lr, theirs / fourth.lr, atol=2e-3)  # weights near 1 have steps of 1e-7


def test_without_generators_they_stay_as_they_are(copy, models):
    (copy / "rng-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rng-00000.safetensors is missing; --no-load-rng goes on"):
        load(copy, fresh(models))
    random.seed(5)
    expected = random.random()
    random.seed(5)
    assert not load(copy, fresh(models), generators=False).generators
    assert random.random() == expected


def test_one_save_is_under_way_at_a_time(models, tmp_path):
    policy = fresh(models)
    kept = Snapshot(policy.network, policy)
    with pytest.raises(RuntimeError, match="nothing was taken"):
        kept.write(tmp_path / "none")
    kept.take()
    with pytest.raises(RuntimeError, match="one save is under way at a time"):
        kept.take()
    kept.drop()
    kept.take()
    kept.write(tmp_path / "one")
    memory = [shard.tensor.data_ptr() for shard in kept._held["model"]]
    kept.take()
    assert memory == [shard.tensor.data_ptr() for shard in kept._held["model"]], "host memory is used again"


def test_a_reference_is_saved_with_its_version_and_no_optimizer(models, tmp_path):
    options = tiny.options(ref_load=models / "qwen3")
    work, other = ReferenceWork(options), ReferenceWork(options)
    policy = fresh(models)
    worker.train(policy, worker.BEFORE)
    work.reference.load(policy.state())
    work.take_snapshot(6, 4)
    assert set(work.save(str(tmp_path / "reference"))) == FILES - {"optimizer-00000.safetensors"}
    assert other.load(str(tmp_path / "reference")).about == {"batch": 6, "version": 4}
    assert np.array_equal(other.logprobs(tiny.batch(1)), policy.logprobs(tiny.batch(1)))
    with pytest.raises(CheckpointError, match="holds no optimizer state; --no-load-optim"):
        load(tmp_path / "reference", policy)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_shorter_by_one_byte_or_has_another_bit_is_named(name, copy):
    path = copy / name
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    with pytest.raises(PartError, match=f"{name} has {len(data) - 1} bytes, {len(data)} were written"):
        parts.verify(copy)
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PartError, match=f"{name} is damaged"):
        parts.verify(copy)


def test_a_truncated_file_is_not_loaded_and_nothing_changes(copy, models):
    path = copy / "optimizer-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    policy = fresh(models)
    before = worker.weights(policy)
    with pytest.raises(CheckpointError, match=r"optimizer-00000.safetensors has \d+ bytes, \d+ were written"):
        load(copy, policy)
    assert_equal(worker.weights(policy), before)


def relist(path: Path) -> None:
    """The list as it would be if the files had been written as they are now."""
    files = {file.name: parts.File(file.stat().st_size, parts.digest_of(file)) for file in path.iterdir()}
    (path / "parts.json").unlink(missing_ok=True)
    parts.write_list(path, {name: file for name, file in files.items() if name != "parts.json"})


class Foreign:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return (os.system, ("touch ran",))


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_pickle_in_place_of_a_file_is_refused_and_does_not_run(name, copy, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (copy / name).write_bytes(pickle.dumps(Foreign()))
    relist(copy)
    with pytest.raises(CheckpointError, match=rf"{name} (is no|holds no)"):
        load(copy, fresh(models))
    torch.save(Foreign(), copy / name)
    relist(copy)
    with pytest.raises(CheckpointError, match=rf"{name} (is no|holds no)"):
        load(copy, fresh(models))
    assert not (tmp_path / "ran").exists()


def test_megatrons_own_format_is_refused_by_name(tmp_path, models):
    torch.save(Foreign(), tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=r"common.pt: Megatron's own format, which is read by unpickling"):
        load(tmp_path, fresh(models))
    with pytest.raises(CheckpointError, match=r"state.json is missing; .* is no checkpoint of a model"):
        load(tmp_path / "nowhere", fresh(models))


def test_another_model_is_refused_by_what_differs(saved, models):
    with pytest.raises(CheckpointError, match="tied is False, this model's is True"):
        load(saved, fresh(models, "qwen3-tied"))
    with pytest.raises(CheckpointError, match="ffn is 96, this model's is 128"):
        load(saved, fresh(models, "wide"))
    with pytest.raises(CheckpointError, match="dtype is 'float32', this model's is 'bfloat16'; see --train-dtype"):
        load(saved, fresh(models, train_dtype="bfloat16"))
    critic = Critic(tiny.options(), models / "qwen3")
    with pytest.raises(CheckpointError, match="network is 'LanguageNetwork', this model's is 'ValueNetwork'"):
        snapshot.load(saved, critic.network, critic)


def rewrite(path: Path, change) -> None:
    """The file of shards with other tensors or places."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        places = json.loads(opened.metadata()["places"])
    change(tensors, places)
    save_file(tensors, path, {"places": json.dumps(places)})


NORM = "decoder.final_layernorm.weight"
FC2 = "decoder.layers.mlp.linear_fc2.weight@1.0.0"


def lose(tensors, places):
    del tensors[f"{NORM}@0"]


def lose_a_piece(tensors, places):
    del tensors[FC2]


def reshape(tensors, places):
    tensors[f"{NORM}@0"], places[f"{NORM}@0"] = torch.zeros(32), [NORM, [32], [0]]


def retype(tensors, places):
    tensors[f"{NORM}@0"] = tensors[f"{NORM}@0"].half()


def add(tensors, places):
    tensors["stranger@0"], places["stranger@0"] = torch.zeros(2), ["stranger", [2], [0]]


def misplace(tensors, places):
    places[f"{NORM}@0"] = [NORM, [64, 1], [0]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lose, rf"the checkpoint has no {NORM}"),
        (lose_a_piece, r"hold 0 of 6144 elements of decoder.layers.mlp.linear_fc2.weight"),
        (reshape, rf"{NORM} has shape \[32\], this model's has \[64\]"),
        (retype, rf"{NORM} is F16, this model's is F32; see --train-dtype"),
        (add, r"holds stranger, which this model does not have"),
        (misplace, r"model-00000.safetensors is no file of shards: .*1 axes and a place with 2"),
    ],
)
def test_shards_that_do_not_fit_are_named_and_nothing_changes(change, text, copy, models):
    rewrite(copy / "model-00000.safetensors", change)
    relist(copy)
    policy = fresh(models)
    before = worker.weights(policy)
    with pytest.raises(CheckpointError, match=text):
        load(copy, policy)
    assert_equal(worker.weights(policy), before)


@pytest.mark.parametrize("entry", ["grid", "updates", "about", "architecture"])
def test_a_state_that_lacks_an_entry_is_refused(entry, copy, models):
    state = json.loads((copy / "state.json").read_text())
    del state[entry]
    (copy / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=f"state.json lacks an entry: .*{entry}"):
        load(copy, fresh(models))


# --- a disk that is full ---------------------------------------------------------------------------------------------


def test_a_limit_of_the_file_size_is_an_error_that_names_file_and_bytes(models, tmp_path):
    policy = fresh(models)
    kept = Snapshot(policy.network, policy)
    kept.take()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # the weights fit, the moments do not
    try:
        with pytest.raises(SaveError, match=r"rank 0 on .*File too large; \d{6} bytes are wanted: .*optimizer-00000"):
            kept.write(tmp_path / "checkpoint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "checkpoint").iterdir()) == []
    kept.take()
    kept.write(tmp_path / "checkpoint")
    parts.verify(tmp_path / "checkpoint")


def test_what_was_there_before_is_not_touched(copy, models):
    policy = fresh(models)
    kept = Snapshot(policy.network, policy)
    kept.take()
    with pytest.raises(SaveError, match=r"File exists: .*model-00000.safetensors"):
        kept.write(copy)
    parts.verify(copy)


FULL = """
import errno, os, pathlib, sys
from relax.checkpoints import parts
from relax.megatron.policy import Policy
from relax.megatron.snapshot import SaveError, Snapshot
from tests.megatron import tiny

disk, other, model = map(pathlib.Path, sys.argv[1:])
policy = Policy(tiny.options(), model)
kept = Snapshot(policy.network, policy)
kept.take()
try:
    kept.write(disk / "checkpoint")
except SaveError as error:
    print(error)
assert list((disk / "checkpoint").iterdir()) == []
kept.take()
kept.write(other)
parts.verify(other)
print("and saved elsewhere")
"""


def test_a_full_disk_is_an_error_that_leaves_no_file_and_the_next_save_works(models, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "full.py").write_text(FULL)
    mount = f"mount -t tmpfs -o size=600k tmpfs {tmp_path / 'disk'}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    given = f"{tmp_path / 'full.py'} {tmp_path / 'disk'} {tmp_path / 'other'} {models / 'qwen3'}"
    run = f"{mount} && exec {sys.executable} {given}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["unshare", "-Urm", "sh", "-c", run]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "No space left on device; " in done.stdout
    assert "bytes are wanted: " in done.stdout
    assert done.stdout.endswith("and saved elsewhere\n")


# --- two ranks -------------------------------------------------------------------------------------------------------


def torchrun(act: str, output: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "tests.megatron.snapshot_worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, act, str(output)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """What two processes saved, and two others loaded; and among it a checkpoint of one rank."""
    output = tmp_path_factory.mktemp("two-ranks")
    for kind in {kind for kind, _ in worker.CASES.values()} | {"qwen3"}:
        tiny.save(output / kind, kind)
    one = learner("tensor", {}, output / "qwen3")
    torch.save(worker.save(one, output / "one-rank"), output / "save-one-rank.pt")
    torchrun("save", output)
    torchrun("load", output)
    return output


def read(path: Path) -> dict:
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("case", worker.CASES)
def test_two_ranks_of_a_new_process_go_on_bit_for_bit(case, two_ranks):
    expected, seen = read(two_ranks / f"save-{case}.pt"), read(two_ranks / f"load-{case}.pt")
    parts.verify(two_ranks / f"checkpoint-{case}")
    assert_equal(seen["weights"], expected["weights"])
    assert seen["steps"] == expected["steps"]
    assert_equal(seen["weights_after"], expected["weights_after"])
    assert seen["draws"] == expected["draws"]
    assert expected["draws"][0] != expected["draws"][1], "each rank has generators of its own"
    assert seen["generators"]


@pytest.mark.parametrize("case", worker.CASES)
def test_one_rank_loads_the_weights_of_two_and_goes_on_close_to_them(case, two_ranks):
    kind, changes = worker.CASES[case]
    expected = read(two_ranks / f"save-{case}.pt")
    made = learner(case, {"train_dtype": changes.get("train_dtype", "float32")}, two_ranks / kind)
    with pytest.raises(
        CheckpointError, match=r"was written on 2 ranks.*, this model is on 1 rank, and .*--no-load-rng"
    ):
        worker.load(made, two_ranks / f"checkpoint-{case}")
    seen = worker.load(made, two_ranks / f"checkpoint-{case}", generators=False)
    assert_equal(seen["weights"], expected["weights"])
    assert seen["generators"] is False
    rough = "train_dtype" in changes
    for (loss, norm, step), (want_loss, want_norm, want_step) in zip(seen["steps"], expected["steps"], strict=True):
        assert step == want_step
        assert loss == pytest.approx(want_loss, abs=0.1 if rough else 1e-4)
        assert norm == pytest.approx(want_norm, rel=0.1 if rough else 1e-3)


def test_two_ranks_load_the_weights_of_one(two_ranks):
    expected, seen = read(two_ranks / "save-one-rank.pt"), read(two_ranks / "load-one-rank.pt")
    assert_equal(seen["weights"], expected["weights"])
    assert seen["generators"] is False
    for (loss, norm, _), (want_loss, want_norm, _) in zip(seen["steps"], expected["steps"], strict=True):
        assert (loss, norm) == pytest.approx((want_loss, want_norm), rel=1e-3, abs=1e-4)


def test_a_work_is_saved_beside_training_and_goes_on_from_there(two_ranks):
    seen = read(two_ranks / "led.pt")
    assert seen["about"] == {"batch": 1, "version": 1}
    assert seen["again"] == seen["metrics"]
    assert_equal(seen["weights_again"], seen["weights"])
    assert seen["bytes"] < seen["size"] < seen["bytes"] + 100_000


def test_a_rank_that_cannot_write_is_named_and_the_ranks_go_on(two_ranks):
    seen = read(two_ranks / "led.pt")
    assert "rank 1 on " in seen["refused"]
    assert "File exists" in seen["refused"]
    assert "rank 0" not in seen["refused"]
    assert [path.name for path in (two_ranks / "refused").iterdir()] == ["optimizer-00001.safetensors"]
    assert (two_ranks / "refused" / "optimizer-00001.safetensors").read_text() == "somebody else's"
    parts.verify(two_ranks / "led-later")

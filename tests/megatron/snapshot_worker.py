"""Run by torchrun (see test_model_snapshot.py): trains, saves and trains on, or loads and trains on; leaves what rank 0
saw in a directory.

usage: snapshot_worker.py save|load OUTPUT
"""

import faulthandler
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from relax.megatron import exchange, parallel, snapshot
from relax.megatron.critic import Critic
from relax.megatron.learner import Learner
from relax.megatron.snapshot import SaveError, Snapshot
from relax.services.actor_work import ActorWork
from relax.services.ranks import Leader, follow
from tests.megatron import tiny
from tests.megatron.grid_worker import end, learner, loss_of, value_loss_of, work_options

# case: (kind of model, changed options)
CASES = {
    "tensor": ("qwen3", {"tensor_parallel_size": 2}),
    "tensor-half": ("llama-tied", {"tensor_parallel_size": 2, "train_dtype": "bfloat16"}),
    "pipeline": ("qwen3-tied", {"pipeline_parallel_size": 2}),
    "data": ("qwen2", {}),
    "critic-tensor": ("qwen3-tied", {"tensor_parallel_size": 2, "sequence_parallel": True}),
}
BEFORE, AFTER = range(3), range(3, 5)


def train(trained: Learner, seeds: range) -> list[tuple[float, float, int]]:
    loss = value_loss_of if isinstance(trained, Critic) else loss_of
    results = [trained.train(batch, loss(batch)) for batch in (tiny.batch(seed) for seed in seeds)]
    return [(result.loss, result.grad_norm, result.step) for result in results]


def weights(trained: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trained.state()}


def weights_led(actor: Leader[ActorWork]) -> dict[str, torch.Tensor]:
    actor.run(actor.work.stage, 0)
    return {name: tensor.clone() for name, tensor in actor.run(actor.work.weights, 0)}


def draws() -> list[float]:
    """One number of each generator; every rank has its own."""
    return [torch.rand(()).item(), float(np.random.random()), random.random()]


def everyones(values: list[float]) -> list[list[float]]:
    return exchange.gather(values)


def save(trained: Learner, path: Path) -> dict:
    """Trains, saves while it goes on, trains on."""
    random.seed(dist.get_rank())
    np.random.seed(10 + dist.get_rank())
    torch.manual_seed(20 + dist.get_rank())
    train(trained, BEFORE)
    kept = Snapshot(trained.network, trained)
    draws()
    kept.take({"batch": 3})
    seen = {"weights": weights(trained), "draws": everyones(draws())}
    with ThreadPoolExecutor(1) as beside:
        writing = beside.submit(kept.write, path)
        seen["steps"] = train(trained, AFTER)
        seen["files"] = {name: file.size for name, file in writing.result().items()}
    seen["weights_after"] = weights(trained)
    return seen


def load(trained: Learner, path: Path, generators: bool = True) -> dict:
    """Goes on from what was saved, on another grid without the generators."""
    loaded = snapshot.load(path, trained.network, trained, generators=generators)
    seen: dict = {"about": loaded.about, "generators": loaded.generators}
    seen |= {"weights": weights(trained), "draws": everyones(draws())}
    seen["steps"] = train(trained, AFTER)
    seen["weights_after"] = weights(trained)
    return seen


def lead(output: Path, options) -> dict:
    """What rank 0 gets of a work that it saves: beside training, to a place that refuses one rank, and again."""
    actor = Leader(ActorWork, options, total_steps=8)
    work, seen = actor.work, {}
    seen["bytes"] = actor.run(work.reserve_snapshot)
    actor.run(work.train, tiny.batch(3))
    assert actor.run(work.take_snapshot, 1, 1) == seen["bytes"]
    with ThreadPoolExecutor(1) as beside:
        writing = beside.submit(actor.run, work.save, str(output / "led"))
        seen["metrics"] = [actor.run(work.train, tiny.batch(4)) for _ in range(2)]
        seen["size"] = sum(file.size for file in writing.result().values())
    seen["weights"] = weights_led(actor)
    refused = output / "refused"
    refused.mkdir()
    (refused / "optimizer-00001.safetensors").write_text("somebody else's")
    actor.run(work.take_snapshot, 3, 3)
    try:
        actor.run(work.save, str(refused))
    except SaveError as error:
        seen["refused"] = str(error)
    actor.run(work.take_snapshot, 3, 3)
    actor.run(work.save, str(output / "led-later"))
    seen["about"] = actor.run(work.load, str(output / "led")).about
    seen["again"] = [actor.run(work.train, tiny.batch(4)) for _ in range(2)]
    seen["weights_again"] = weights_led(actor)
    end(actor)
    return seen


def main() -> None:
    act, output = sys.argv[1], Path(sys.argv[2])
    faulthandler.dump_traceback_later(140, exit=True)  # a test that gives up kills torchrun alone
    for case, (kind, changes) in CASES.items():
        made = learner(case, changes, output / kind)
        seen = (save if act == "save" else load)(made, output / f"checkpoint-{case}")
        if dist.get_rank() == 0:
            torch.save(seen, output / f"{act}-{case}.pt")
        # Not through an import of its own: megatron.core must come after relax.megatron.
        parallel.parallel_state.destroy_model_parallel()
    options = work_options(output, tensor_parallel_size=2)
    if act == "load":
        made = learner("tensor", {"tensor_parallel_size": 2}, output / "qwen3")
        seen = load(made, output / "one-rank", generators=False)
        if dist.get_rank() == 0:
            torch.save(seen, output / "load-one-rank.pt")
    elif dist.get_rank() == 0:
        torch.save(lead(output, options), output / "led.pt")
    else:
        follow(ActorWork, options)
    parallel.shutdown()


if __name__ == "__main__":
    main()

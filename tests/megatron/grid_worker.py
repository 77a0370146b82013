"""Run by torchrun (see test_grid.py): trains on one grid after another and leaves what rank 0 saw in a directory.

usage: grid_worker.py OUTPUT CASE...
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from relax.megatron import batches, exchange, parallel
from relax.megatron.critic import Critic
from relax.megatron.learner import Learner
from relax.megatron.policy import Policy
from relax.megatron.reference import Reference
from relax.services.actor_work import ActorWork
from relax.services.critic_work import CriticWork
from relax.services.ranks import Leader, follow
from relax.services.reference_work import ReferenceWork
from relax.weights.checkpoint import checkpoint_tensors
from relax.weights.store import ChunkStore
from tests.megatron import tiny

# case: (kind of model, changed options, samples of a batch); "critic-..." trains a critic, the others a policy
CASES = {
    "tensor": ("qwen3", {"tensor_parallel_size": 2}, 8),
    "tensor-tied": ("llama-tied", {"tensor_parallel_size": 2}, 8),
    "tensor-bias": ("qwen2", {"tensor_parallel_size": 2}, 8),
    "sequence": ("qwen3", {"tensor_parallel_size": 2, "sequence_parallel": True}, 8),
    "pipeline": ("qwen3", {"pipeline_parallel_size": 2}, 8),
    "pipeline-tied": ("qwen3-tied", {"pipeline_parallel_size": 2}, 8),
    "context": ("qwen3", {"context_parallel_size": 2}, 8),
    "data": ("qwen3", {}, 7),
    "data-idle": ("qwen3", {}, 1),
    "critic-tensor": ("llama-tied", {"tensor_parallel_size": 2}, 8),
    "critic-sequence": ("qwen3", {"tensor_parallel_size": 2, "sequence_parallel": True}, 8),
    "critic-pipeline": ("qwen3-tied", {"pipeline_parallel_size": 2}, 8),
    "critic-context": ("qwen3", {"context_parallel_size": 2}, 8),
    "critic-data": ("qwen2", {}, 7),
    "tensor-data": ("qwen3", {"tensor_parallel_size": 2}, 7),
    "tensor-pipeline": ("qwen3-tied", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8),
    "critic-tensor-pipeline": (
        "qwen3-tied",
        {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2},
        8,
    ),
    "context-tensor-sequence": (
        "qwen3",
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
        8,
    ),
}
STEPS = 5


def recorded(samples: int) -> list[dict[str, np.ndarray]]:
    """The five batches of a case; a batch of one sample has a response."""
    made = [tiny.batch(seed, samples=max(samples, 2)) for seed in range(STEPS)]
    return [batches.select(batch, 0, samples) for batch in made]


def loss_of(part):
    """Sample mean of token means, as the loss functions of relax.algorithms divide by default."""
    count = batches.num_samples(part)

    def loss_fn(current, entropy, fields):
        mask = fields["loss_mask"]
        terms = torch.where(mask, -current * fields["advantages"] - 0.01 * entropy, 0.0)
        loss = (terms.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / count
        return loss, {"tokens": (mask.sum(), 1), "entropy": (torch.where(mask, entropy, 0.0).sum(), mask.sum())}

    return loss_fn


def value_loss_of(part):
    """Mean over the part's loss tokens of the squared distance from the advantages, here any numbers."""
    count = max(batches.num_loss_tokens(part), 1)

    def loss_fn(values, fields):
        mask = fields["loss_mask"]
        loss = torch.where(mask, (values - fields["advantages"]) ** 2, 0.0).sum() / count
        return loss, {"tokens": (mask.sum(), 1), "value": (torch.where(mask, values, 0.0).sum(), mask.sum())}

    return loss_fn


def learner(case: str, changes: dict, path: Path) -> Learner:
    made = Critic if case.startswith("critic") else Policy
    return made(tiny.options(micro_batch_size=3, **changes), path)


def observe(learner: Learner, given: list[dict[str, np.ndarray]]) -> dict:
    """What a test compares: forward results, gradients of the first step, losses and norms, the weights at the end."""
    critic = isinstance(learner, Critic)
    forward = learner.values if critic else learner.logprobs
    loss = value_loss_of if critic else loss_of
    seen: dict = {"forward": [forward(batch) for batch in given], "steps": []}
    learner.optimizer.zero_grad()
    learner.network.backward(given[0], loss(given[0]))
    seen["gradients"] = dict(learner.network.state(learner.network.gradients()))
    for batch in given:
        result = learner.train(batch, loss(batch))
        seen["steps"].append((result.loss, result.grad_norm, result.metrics))
    seen["weights"] = dict(learner.state())
    return seen


def refreshed(policy: Policy, checkpoint: Path, exported: Path, changes: dict, batch: dict[str, np.ndarray]) -> dict:
    """Log-probs of a reference that took over the policy's weights, and of one that was built from their export."""
    options = tiny.options(micro_batch_size=3, **changes)
    reference = Reference(options, checkpoint)
    before = reference.logprobs(batch)
    reference.load(policy.state())
    return {
        "before": before,
        "refreshed": reference.logprobs(batch),
        "fresh": Reference(options, exported).logprobs(batch),
    }


def work_options(output: Path, **changes):
    """Options of the three works, over the checkpoints in `output`."""
    return tiny.options(
        hf_checkpoint=str(output / "qwen3"),
        ref_load=output / "qwen3",
        num_steps_per_rollout=2,
        micro_batch_size=3,
        advantage_estimator="grpo",
        **changes,
    )


def value_batch() -> dict[str, np.ndarray]:
    batch = tiny.batch(3)
    return batch | {"values": 0.1 * batch["advantages"], "returns": batch["advantages"]}


def publish(output: Path) -> tuple[str, str]:
    """The weights of another checkpoint as a published version: (store, manifest)."""
    store = ChunkStore(output / "store", create=True)
    tensors = checkpoint_tensors(output / "other")
    manifest = store.publish(tensors, run_id="test", lineage=0, version=1, step=1)
    return str(store.directory), manifest.to_json().decode()


def read_beside_training(actor: Leader[ActorWork]) -> dict:
    """Versions read one after another in one thread while another one trains, and each of them read at rest before."""
    seen: dict = {"at_rest": [], "beside": [], "steps": 0}
    tried = threading.Event()
    for number in range(4):
        place = number % 2
        actor.run(actor.work.stage, place)
        seen["at_rest"].append(dict(actor.run(actor.work.weights, place)))
        tried.clear()

        def read(place=place) -> dict:
            taken = {}
            for name, tensor in actor.run(actor.work.weights, place):
                taken[name] = tensor
                if len(taken) == 1:  # in the middle of it, at least one batch is trained
                    assert tried.wait(60)
            return taken

        with ThreadPoolExecutor(1) as beside:
            taking = beside.submit(read)
            while not taking.done():
                actor.run(actor.work.train, tiny.batch(10 + seen["steps"]))
                seen["steps"] += 1
                tried.set()
            seen["beside"].append(taking.result())
    return seen


def end(leader: Leader) -> None:
    for lane in leader.lanes:
        leader.end(lane)


def lead(output: Path, options) -> dict:
    """What rank 0 gets of the three works, one after the other, as their services command them."""
    seen: dict = {}
    actor = Leader(ActorWork, options, total_steps=4)
    seen["train"] = actor.run(actor.work.train, tiny.batch(3))
    actor.run(actor.work.stage, 1)
    seen["weights"] = dict(actor.run(actor.work.weights, 1))
    for lane in actor.lanes:
        actor.idle(lane)
    actor.run(actor.work.export, str(output / "export-led"))
    seen["beside"] = read_beside_training(actor)
    end(actor)
    critic = Leader(CriticWork, options, None)
    seen["values"] = critic.run(critic.work.values, tiny.batch(4))
    seen["train_values"] = critic.run(critic.work.train, batch=value_batch())
    seen["values_after"] = critic.run(critic.work.values, tiny.batch(4))
    end(critic)
    reference = Leader(ReferenceWork, options)
    seen["logprobs"] = reference.run(reference.work.logprobs, tiny.batch(4))
    reference.run(reference.work.refresh, *publish(output))
    seen["refreshed"] = reference.run(reference.work.logprobs, tiny.batch(4))
    end(reference)
    return seen


def main() -> None:
    output = Path(sys.argv[1])
    for case in sys.argv[2:]:
        kind, changes, samples = CASES[case]
        made = learner(case, changes, output / kind)
        # Only rank 0 has the batches, as in the actor.
        first = dist.get_rank() == 0
        given = [exchange.broadcast(*(({}, batch) if first else (None,)))[1] for batch in recorded(samples)]
        seen = observe(made, given)
        if isinstance(made, Policy):
            exported = output / f"export-{case}"
            made.save_hf(exported)
            seen["reference"] = refreshed(made, output / kind, exported, changes, given[0])
        if dist.get_rank() == 0:
            torch.save(seen, output / f"{case}.pt")
        # Not through an import of its own: megatron.core must come after relax.megatron.
        parallel.parallel_state.destroy_model_parallel()
    if dist.get_world_size() == 2:
        options = work_options(output, tensor_parallel_size=2)
        if dist.get_rank() == 0:
            torch.save(lead(output, options), output / "led.pt")
        else:
            for work in (ActorWork, CriticWork, ReferenceWork):
                follow(work, options)
        parallel.parallel_state.destroy_model_parallel()
    header, arrays = exchange.broadcast(
        *(
            ({"batch": 3}, {"a": np.arange(5, dtype=np.int16), "b": np.zeros((0, 3))})
            if dist.get_rank() == 0
            else (None,)
        )
    )
    sums = exchange.sum_metrics({"all": (1.0, 2.0), f"rank{dist.get_rank()}": (0.5, 1.0)}, [dist.group.WORLD])
    if dist.get_rank() == dist.get_world_size() - 1:
        told = {"header": header, "a": arrays["a"].tolist(), "b": list(arrays["b"].shape), "sums": sums}
        (output / "exchange.json").write_text(json.dumps(told))
    try:
        parallel.initialize(tiny.options(tensor_parallel_size=3))
    except parallel.GridError as error:
        (output / f"refused-{dist.get_rank()}").write_text(str(error))
    parallel.shutdown()


if __name__ == "__main__":
    main()

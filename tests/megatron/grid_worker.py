"""Run by torchrun (see test_grid.py): trains on one grid after another and leaves what rank 0 saw in a directory.

usage: grid_worker.py OUTPUT CASE...
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from relax.megatron import batches, exchange, parallel
from relax.megatron.policy import Policy
from tests.megatron import tiny

# case: (kind of model, changed options, samples of a batch)
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
    "tensor-data": ("qwen3", {"tensor_parallel_size": 2}, 7),
    "tensor-pipeline": ("qwen3-tied", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8),
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


def observe(policy: Policy, given: list[dict[str, np.ndarray]]) -> dict:
    """What a test compares: log-probs, gradients of the first step, losses and norms, and the weights at the end."""
    seen: dict = {"logprobs": [policy.logprobs(batch, 0.7) for batch in given], "steps": []}
    policy.optimizer.zero_grad()
    policy.network.backward(given[0], policy.temperature, loss_of(given[0]))
    seen["gradients"] = dict(policy.network.state(gradients=True))
    for batch in given:
        result = policy.train(batch, loss_of(batch))
        seen["steps"].append((result.loss, result.grad_norm, result.metrics))
    seen["weights"] = dict(policy.state())
    return seen


def main() -> None:
    output = Path(sys.argv[1])
    for case in sys.argv[2:]:
        kind, changes, samples = CASES[case]
        policy = Policy(tiny.options(micro_batch_size=3, **changes), output / kind)
        # Only rank 0 has the batches, as in the actor.
        given = [exchange.broadcast_batch(batch if dist.get_rank() == 0 else None) for batch in recorded(samples)]
        seen = observe(policy, given)
        policy.save_hf(output / f"export-{case}")
        if dist.get_rank() == 0:
            torch.save(seen, output / f"{case}.pt")
        # Not through an import of its own: megatron.core must come after relax.megatron.
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

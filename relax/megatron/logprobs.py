"""Log-probability and entropy of tokens from logits whose vocabulary is cut over tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# exp of it is 0 in float32, and 0 times it is 0: keeps 0 x -inf out of the entropy.
_LOWEST = -1e4


def logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of the target, entropy), float32 [n] each, of softmax(logits / temperature).

    logits: [n, columns of this rank], any float dtype, left as they are; rank r of `group` holds columns
    r x columns and on, those from `vocab` on being padding without probability. targets: int64 [n], in the whole
    vocabulary. Two reductions over the group, no gather. Gradients are exact for both outputs.
    Raises ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    logp, entropy = _LogProbEntropy.apply(logits, targets, vocab, temperature, group)
    return logp, entropy


class _LogProbEntropy(torch.autograd.Function):
    """With x = logits/T, p = softmax(x), H = -sum p log p: dlogp/dx = onehot - p, dH/dx = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab: int, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        columns = logits.shape[-1]
        first = rank * columns
        real = min(max(vocab - first, 0), columns)
        x = logits.float()
        if temperature != 1.0:
            x = x / temperature
        if real < columns:
            x = x.masked_fill(torch.arange(columns, device=x.device) >= real, -torch.inf)
        highest = x.amax(-1)
        if ranks > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        x = x - highest.unsqueeze(-1)
        local = targets - first
        own = (local >= 0) & (local < real)
        local = local.clamp(0, columns - 1)
        target = torch.where(own, x.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        p = x.exp()
        sums = torch.stack([p.sum(-1), (p * x.clamp_(min=_LOWEST)).sum(-1), target])
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(p.div_(total.unsqueeze(-1)), entropy, local, own)
        ctx.dtype, ctx.temperature = logits.dtype, temperature
        ctx.set_materialize_grads(False)
        return target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        grad_logp, grad_entropy = grads
        p, entropy, local, own = ctx.saved_tensors
        grad = torch.zeros_like(p)
        if grad_logp is not None:
            grad = p * -grad_logp.unsqueeze(-1)
            grad.scatter_add_(-1, local.unsqueeze(-1), torch.where(own, grad_logp, 0.0).unsqueeze(-1))
        if grad_entropy is not None:
            # The smallest normal float: p log p is 0 there.
            log_p = p.clamp_min(1e-38).log()
            grad = grad - p * (log_p + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
        if ctx.temperature != 1.0:
            grad = grad / ctx.temperature
        return grad.to(ctx.dtype), None, None, None, None

"""The training signal of a whole rollout batch: rewards -> group normalizer -> advantages per token -> whitening.

What the advantages service calls. Arrays are numpy, flat and ragged (sample after sample), so nothing here depends on
padding; a group is found by its id, so nothing depends on the order of arrival. Functions of the user (hooks) may take
the place of the normalizer and of the advantage function.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relax.algorithms import advantages, hooks, ragged, signal_metrics
from relax.algorithms.registry import RAW, AlgorithmSpec
from relax.algorithms.tensors import masked

TOO_FEW_REWARDS = "too_few_rewards"
BAD_REWARD = "bad_reward"
# Advantages and losses are float32: from here on their products overflow.
LARGEST_REWARD = 1e15


@dataclass(frozen=True, slots=True)
class Signal:
    """advantages, returns: float32, one a response token, 0 outside the loss mask; `returns` only for estimators that
    make them. scores: float64 [N], the scalar of each sample after the normalizer (0 where it abstained).
    metrics: name -> (sum, count)."""

    advantages: np.ndarray
    returns: np.ndarray | None
    scores: np.ndarray
    metrics: dict[str, tuple[float, float]]


def unusable(spec: AlgorithmSpec, rewards: np.ndarray) -> str | None:
    """Why a group with these rewards (float64 [samples], NaN = abstained) cannot be trained; None when it can.

    A reward that is infinite, or too large for float32 arithmetic, is a fault of the reward function; its group is
    dropped and counted.
    """
    if (np.abs(rewards) > LARGEST_REWARD).any():
        return BAD_REWARD
    return TOO_FEW_REWARDS if np.isfinite(rewards).sum() < spec.min_scored else None


def batch_advantages(
    spec: AlgorithmSpec,
    options: Any,
    rewards: np.ndarray,
    group_ids: np.ndarray,
    response_lens: np.ndarray,
    loss_mask: np.ndarray,
    *,
    behaviour_logprobs: np.ndarray | None = None,
    reference_logprobs: np.ndarray | None = None,
    values: np.ndarray | None = None,
    incomplete_groups: int = 0,
) -> Signal:
    """Advantages of all samples of one rollout batch, before it is cut into optimizer steps.

    rewards: float64 [N], NaN = abstained; group_ids, response_lens: [N]; loss_mask, and where the estimator asks for
    them behaviour_logprobs, reference_logprobs, values: one a response token. An abstaining sample takes no part in its
    group's statistics and must be masked. `incomplete_groups` were seen since the last batch and dropped for too few
    rewards (a metric of RLOO). Raises ValueError, naming the group, for rewards that `unusable` would refuse,
    and for arrays that do not fit each other; HookError for a hook's result that cannot be used.
    """
    tokens = int(response_lens.sum())
    offered = {"loss_mask": loss_mask, "values": values, "kl": None}
    if behaviour_logprobs is not None and reference_logprobs is not None:
        # The KL of the reward belongs to the policy that sampled, hence behaviour and not proximal log-probs.
        offered["kl"] = behaviour_logprobs.astype(np.float64) - reference_logprobs.astype(np.float64)
    for name, source in (("kl", "behaviour_logprobs and reference_logprobs"), ("values", "values")):
        if name in spec.advantage.inputs and offered[name] is None:
            raise ValueError(f"{spec.name} needs {source}")
    for name, array in offered.items():
        if array is not None and len(array) != tokens:
            raise ValueError(f"{name} has {len(array)} entries, response_lens add up to {tokens}")

    scores = group_scores(spec, options, rewards, group_ids)
    mask = loss_mask.astype(bool)
    if mask[np.repeat(~np.isfinite(rewards), response_lens)].any():
        raise ValueError("a sample whose reward function abstained has loss tokens; mask it")
    if hooks.ADVANTAGE.path(options) is None:
        raw, returns = _per_token(spec, options, scores, response_lens, offered)
    else:
        raw, returns = _custom_advantages(spec, options, scores, group_ids, response_lens, offered)
    final = raw
    if options.normalize_advantages:
        ddof, floor = spec.whitening
        final = advantages.whiten(torch.from_numpy(raw), torch.from_numpy(mask), ddof, floor).numpy()
    metrics = signal_metrics.of_tokens(spec, options, raw, final, returns, mask)
    metrics |= signal_metrics.of_groups(
        spec, options, rewards, scores, group_ids, response_lens, mask, incomplete_groups
    )
    return Signal(final.astype(np.float32), None if returns is None else returns.astype(np.float32), scores, metrics)


def group_scores(spec: AlgorithmSpec, options: Any, rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """float64 [N]: each sample's reward normalized within its group, 0 for samples that abstained."""
    custom = hooks.REWARD_POST_PROCESS.path(options) is not None
    normalizer = RAW if options.disable_rewards_normalization else spec.normalizer
    scores = np.zeros(len(rewards))
    for group, members in signal_metrics.by_group(group_ids):
        if reason := unusable(spec, rewards[members]):
            raise ValueError(f"group {group} cannot be trained ({reason}): rewards {rewards[members].tolist()}")
        if not custom:
            scored = members[np.isfinite(rewards[members])]
            scores[scored] = normalizer({"rewards": torch.from_numpy(rewards[scored])}, options).numpy()
    return _custom_scores(options, rewards, group_ids) if custom else scores


def _custom_scores(options: Any, rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    hook = hooks.REWARD_POST_PROCESS
    scores = np.array(hook.call(options, rewards=rewards.copy(), group_ids=group_ids.copy()), np.float64)
    if scores.shape != rewards.shape:
        raise hook.refuse(options, f"returned scores of shape {scores.shape} for {len(rewards)} samples")
    scored = np.isfinite(rewards)
    bad = np.flatnonzero(scored & ~np.isfinite(scores))
    if len(bad):
        where = f"sample {bad[0]}, of group {group_ids[bad[0]]} and reward {rewards[bad[0]]}"
        raise hook.refuse(options, f"the score of {where}, is {scores[bad[0]]}")
    return np.where(scored, scores, 0.0)


def _per_token(
    spec: AlgorithmSpec,
    options: Any,
    scores: np.ndarray,
    lengths: np.ndarray,
    flat: dict[str, np.ndarray | None],
) -> tuple[np.ndarray, np.ndarray | None]:
    """The advantage function over blocks of samples; float64, flat. It works on each sample by itself."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    made: list[tuple[np.ndarray, np.ndarray | None]] = []
    for block in ragged.blocks(lengths):
        of_block = slice(ends[block.start], ends[block.stop])
        rows = lengths[block]
        padded = {
            name: torch.from_numpy(ragged.pad(np.asarray(array[of_block], np.float64), rows))
            for name, array in flat.items()
            if array is not None
        }
        mask, scalars = padded["loss_mask"], torch.from_numpy(scores[block])
        inputs = padded | {"mask": mask, "scores": scalars}
        if "token_rewards" in spec.advantage.inputs:
            inputs["token_rewards"] = advantages.last_token_rewards(scalars, mask)
        result = spec.advantage(inputs, options)
        parts = result if isinstance(result, tuple) else (result, None)
        made.append(tuple(None if x is None else ragged.unpad(x.numpy(), rows) for x in parts))  # type: ignore[arg-type]
    if not made:
        return np.zeros(0), None
    joined = np.concatenate([a for a, _ in made])
    has_returns = made[0][1] is not None
    return joined, np.concatenate([r for _, r in made if r is not None]) if has_returns else None


def _custom_advantages(
    spec: AlgorithmSpec,
    options: Any,
    scores: np.ndarray,
    group_ids: np.ndarray,
    lengths: np.ndarray,
    flat: dict[str, np.ndarray | None],
) -> tuple[np.ndarray, np.ndarray | None]:
    """The user's advantage function, once over the whole batch; float64, flat."""
    hook = hooks.ADVANTAGE

    def padded(name: str) -> torch.Tensor | None:
        array = flat[name] if name == "loss_mask" or name in spec.advantage.inputs else None
        return None if array is None else torch.from_numpy(ragged.pad(np.asarray(array, np.float64), lengths))

    loss_mask = padded("loss_mask")
    assert loss_mask is not None
    mask = loss_mask.bool()
    result = hook.call(
        options,
        scores=torch.from_numpy(scores.copy()),
        mask=mask,
        group_ids=torch.from_numpy(group_ids.astype(np.int64)),
        kl=padded("kl"),
        values=padded("values"),
    )
    parts = result if isinstance(result, tuple) else (result,)
    wanted = ("advantages", "returns")[: 2 if "critic" in spec.needs or len(parts) > 1 else 1]
    if len(parts) != len(wanted):
        raise hook.refuse(options, f"returned {len(parts)} tensors; {spec.name} needs {' and '.join(wanted)}")
    made = []
    for name, part in zip(wanted, parts, strict=True):
        if not isinstance(part, torch.Tensor) or part.shape != mask.shape:
            seen = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            raise hook.refuse(options, f"returned {name} of {seen}; it must be a tensor of {tuple(mask.shape)}")
        inside = masked(part.detach().double(), mask)
        bad = (~torch.isfinite(inside)).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            raise hook.refuse(options, f"{name} of sample {row}, token {column}, is {inside[row, column].item()}")
        made.append(ragged.unpad(inside.numpy(), lengths))
    return made[0], made[1] if len(made) > 1 else None

"""From the groups of a batch to what the trainer takes. Pure functions over numpy arrays; no message, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.algorithms import signal
from relax.algorithms.registry import AlgorithmSpec
from relax.metrics import Metrics
from relax.metrics import rollout as rollout_metrics
from relax.protocol.messages import GroupOrder
from relax.protocol.tensors import FINISH_LENGTH, Responses, SampledGroup, TrainTensors
from relax.services.versions import trainable


@dataclass(slots=True, eq=False)
class ScoredGroup:
    """A group that waits until its batch is assembled.

    rewards: float64 [samples], NaN where the reward function abstained. reference_logprobs: float32, one a response
    token, by version `reference_version` of the reference; None before it was asked.
    """

    order: GroupOrder
    sampled: SampledGroup
    rewards: np.ndarray
    reference_logprobs: np.ndarray | None = None
    reference_version: int = -1

    def responses(self) -> Responses:
        responses = self.sampled.responses()
        return Responses.of([self.order.prompt_tokens] * len(responses), responses)


@dataclass(frozen=True, slots=True)
class RawBatch:
    """The samples of a batch in (group id, sample index) order; arrays as in TrainTensors."""

    responses: Responses
    loss_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    reference_logprobs: np.ndarray | None
    rewards: np.ndarray
    group_ids: np.ndarray
    runs: np.ndarray
    finish: np.ndarray


def join(members: Sequence[ScoredGroup], options: Any) -> RawBatch:
    """The groups of a batch, whatever order they come in."""
    members = sorted(members, key=lambda m: m.order.lease.group)
    counts = [len(m.rewards) for m in members]
    rewards = np.concatenate([m.rewards for m in members])
    prompts = [m.order.prompt_tokens for m in members for _ in range(len(m.rewards))]
    responses = Responses.of(prompts, [r for m in members for r in m.sampled.responses()])
    runs = _join_runs([m.sampled.runs for m in members], counts)
    scored = [m.reference_logprobs for m in members if m.reference_logprobs is not None]
    return RawBatch(
        responses=responses,
        # An abstaining sample has no reward to learn from: it leaves the loss.
        loss_mask=np.repeat(np.isfinite(rewards)[runs[:, 0]] & trainable(runs, options), runs[:, 2]).astype(np.uint8),
        behaviour_logprobs=np.concatenate([m.sampled.behaviour_logprobs for m in members]),
        reference_logprobs=np.concatenate(scored) if scored else None,
        rewards=rewards,
        group_ids=np.repeat(np.array([m.order.lease.group for m in members], np.int64), counts),
        runs=runs,
        finish=np.concatenate([m.sampled.finish for m in members]),
    )


def measure(metrics: Metrics, batch: int, raw: RawBatch) -> None:
    """What the batch of rollouts looked like."""
    rollout_metrics.rewards(metrics, raw.rewards, raw.group_ids)
    rollout_metrics.lengths(metrics, raw.responses.response_lens, raw.finish == FINISH_LENGTH)
    rollout_metrics.staleness(metrics, batch, raw.runs, raw.loss_mask)


def train_tensors(
    spec: AlgorithmSpec,
    options: Any,
    raw: RawBatch,
    values: np.ndarray | None,
    incomplete_groups: int,
    metrics: Metrics,
) -> TrainTensors:
    """The batch with its advantages, over all of it at once. `values`: the critic's, float32, one a response token."""
    responses = raw.responses
    result = signal.batch_advantages(
        spec,
        options,
        raw.rewards,
        raw.group_ids,
        responses.response_lens,
        raw.loss_mask,
        behaviour_logprobs=raw.behaviour_logprobs,
        reference_logprobs=raw.reference_logprobs,
        values=values,
        incomplete_groups=incomplete_groups,
    )
    for name, (total, count) in result.metrics.items():
        metrics.mean(name, total, count)
    return TrainTensors(
        tokens=responses.tokens,
        prompt_lens=responses.prompt_lens,
        response_lens=responses.response_lens,
        loss_mask=raw.loss_mask,
        behaviour_logprobs=raw.behaviour_logprobs,
        advantages=result.advantages,
        rewards=raw.rewards,
        group_ids=raw.group_ids,
        runs=raw.runs,
        reference_logprobs=raw.reference_logprobs if options.use_kl_loss else None,
        values=values,
        returns=result.returns if values is not None else None,
    )


def _join_runs(runs: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """The runs of all groups with sample indices of the batch."""
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.concatenate([r + np.array([[o, 0, 0]]) for r, o in zip(runs, offsets, strict=True)])

"""The bundles of tensors that travel: the samples of a group, the batch the trainer takes, and what a model that only
looks at responses is asked about.

Both are ragged and flat: sample after sample, with the lengths beside. Nobody pads before the last moment, so padding
can never become data. Every bundle is checked when it is taken apart; what does not fit names the bundle and the field.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

FINISH_STOP = 0  # the engine reports a stop token
FINISH_LENGTH = 1  # the engine reports the length limit: a truncated response
UNFINISHED = 2  # the sample goes on at whichever replica takes it up: only in a parked group

Arrays = dict[str, np.ndarray]


class TensorError(ValueError):
    """A bundle of arrays that contradicts itself; the text names the bundle, the field and what was seen."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """What the engine sampled for one group of n samples with R version runs in all.

    response_tokens: int32 [sum of response_lens]; response_lens: int32 [n]; behaviour_logprobs: float32, one a token;
    finish: uint8 [n], FINISH_STOP or FINISH_LENGTH; runs: int64 [R, 3] rows (sample, version, tokens), in token order.
    A parked group may have UNFINISHED samples too, and those without a token yet have no run.
    """

    response_tokens: np.ndarray
    response_lens: np.ndarray
    behaviour_logprobs: np.ndarray
    finish: np.ndarray
    runs: np.ndarray

    def arrays(self) -> Arrays:
        return _arrays(self)

    @classmethod
    def from_arrays(cls, arrays: Arrays, where: str, *, parked: bool = False) -> "SampledGroup":
        """Raises TensorError, naming `where`, when lengths disagree, a log-prob is not finite, or a sample is
        unfinished and the group not `parked`."""
        group = cls(**_take(cls, arrays, where))
        tokens = int(group.response_lens.sum())
        _same(where, "response_tokens", len(group.response_tokens), tokens)
        _same(where, "behaviour_logprobs", len(group.behaviour_logprobs), tokens)
        _same(where, "finish", len(group.finish), len(group.response_lens))
        # By comparing: np.isin would cost more than all the other checks of a small group.
        if len(odd := np.flatnonzero(group.finish > (UNFINISHED if parked else FINISH_LENGTH))):
            kind = "a parked" if parked else "a finished"
            raise TensorError(f"{where}: sample {odd[0]} has finish {group.finish[odd[0]]}, which {kind} group has not")
        _runs(where, group.runs, group.response_lens, group.finish == UNFINISHED)
        if not np.isfinite(group.behaviour_logprobs).all():
            bad = int(np.flatnonzero(~np.isfinite(group.behaviour_logprobs))[0])
            raise TensorError(f"{where}: behaviour_logprobs[{bad}] is {group.behaviour_logprobs[bad]}, not a number")
        return group

    def responses(self) -> list[np.ndarray]:
        return np.split(self.response_tokens, np.cumsum(self.response_lens)[:-1])


@dataclass(frozen=True, slots=True)
class Responses:
    """N responses to be looked at by the reference or the critic.

    tokens: int32 [sum(prompt_lens + response_lens)], prompt then response, sample after sample; prompt_lens,
    response_lens: int32 [N].
    """

    tokens: np.ndarray
    prompt_lens: np.ndarray
    response_lens: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> "Responses":
        """From the token ids of each prompt and of its response."""
        tokens = [part for pair in zip(prompts, responses, strict=True) for part in pair]
        return cls(
            tokens=np.concatenate(tokens).astype(np.int32),
            prompt_lens=np.array([len(p) for p in prompts], np.int32),
            response_lens=np.array([len(r) for r in responses], np.int32),
        )

    def arrays(self) -> Arrays:
        return _arrays(self)

    @classmethod
    def from_arrays(cls, arrays: Arrays, where: str) -> "Responses":
        """Raises TensorError, naming `where`, when the lengths disagree."""
        held = cls(**_take(cls, arrays, where))
        _same(where, "response_lens", len(held.response_lens), len(held.prompt_lens))
        _same(where, "tokens", len(held.tokens), int(held.prompt_lens.sum() + held.response_lens.sum()))
        return held


@dataclass(frozen=True, slots=True)
class TrainTensors:
    """The batch for the trainer: N samples in (group id, sample index) order, R version runs.

    tokens: int32 [sum(prompt_lens + response_lens)], prompt then response, sample after sample; prompt_lens,
    response_lens: int32 [N]; loss_mask: uint8, behaviour_logprobs and advantages: float32, one a response token;
    rewards: float64 [N], NaN where the reward function abstained; group_ids: int64 [N]; runs: int64 [R, 3].
    Where the run needs them, float32, one a response token: reference_logprobs (for a KL in the loss), values (those
    that the advantages were made from) and returns (for the critic).
    """

    tokens: np.ndarray
    prompt_lens: np.ndarray
    response_lens: np.ndarray
    loss_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    group_ids: np.ndarray
    runs: np.ndarray
    reference_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None

    def arrays(self) -> Arrays:
        return _arrays(self)

    @classmethod
    def from_arrays(cls, arrays: Arrays, where: str) -> "TrainTensors":
        """Raises TensorError, naming `where`, when the lengths of the parts disagree."""
        batch = cls(**_take(cls, arrays, where))
        samples, tokens = len(batch.response_lens), int(batch.response_lens.sum())
        for name in ("prompt_lens", "rewards", "group_ids"):
            _same(where, name, len(getattr(batch, name)), samples)
        for name in ("loss_mask", "behaviour_logprobs", "advantages", "reference_logprobs", "values", "returns"):
            if (array := getattr(batch, name)) is not None:
                _same(where, name, len(array), tokens)
        _same(where, "tokens", len(batch.tokens), tokens + int(batch.prompt_lens.sum()))
        _runs(where, batch.runs, batch.response_lens)
        return batch


_DTYPES: dict[str, tuple[Any, int]] = {
    "response_tokens": (np.int32, 1),
    "response_lens": (np.int32, 1),
    "behaviour_logprobs": (np.float32, 1),
    "finish": (np.uint8, 1),
    "runs": (np.int64, 2),
    "tokens": (np.int32, 1),
    "prompt_lens": (np.int32, 1),
    "loss_mask": (np.uint8, 1),
    "advantages": (np.float32, 1),
    "reference_logprobs": (np.float32, 1),
    "values": (np.float32, 1),
    "returns": (np.float32, 1),
    "rewards": (np.float64, 1),
    "group_ids": (np.int64, 1),
}


def _arrays(bundle: Any) -> Arrays:
    held = {f.name: getattr(bundle, f.name) for f in fields(bundle)}
    return {name: array for name, array in held.items() if array is not None}


def _take(cls: Any, arrays: Arrays, where: str) -> Arrays:
    names = [f.name for f in fields(cls)]
    if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in arrays]:
        raise TensorError(f"{where}: {cls.__name__} lacks {', '.join(missing)}")
    if unknown := [n for n in arrays if n not in names]:
        raise TensorError(f"{where}: {cls.__name__} does not know {', '.join(unknown)}")
    for name in arrays:
        dtype, dims = _DTYPES[name]
        if arrays[name].dtype != dtype or arrays[name].ndim != dims:
            seen = f"{arrays[name].dtype} with {arrays[name].ndim} dimensions"
            raise TensorError(f"{where}: {name} must be {np.dtype(dtype)} with {dims} dimensions, it is {seen}")
    return dict(arrays)


def _same(where: str, name: str, seen: int, expected: int) -> None:
    if seen != expected:
        raise TensorError(f"{where}: {name} has {seen} entries, the lengths say {expected}")


def _runs(where: str, runs: np.ndarray, lens: np.ndarray, unfinished: np.ndarray | bool = False) -> None:
    if runs.shape[1:] != (3,):
        raise TensorError(f"{where}: runs must be [R, 3] (sample, version, tokens), it is {list(runs.shape)}")
    if len(runs) and (runs[:, 0].min() < 0 or runs[:, 0].max() >= len(lens)):
        raise TensorError(f"{where}: runs name sample {int(runs[:, 0].max())} of {len(lens)}")
    if (np.diff(runs[:, 0]) < 0).any():
        raise TensorError(f"{where}: runs are not in the order of the samples")
    covered = np.bincount(runs[:, 0], weights=runs[:, 2], minlength=len(lens)).astype(np.int64)
    if not np.array_equal(covered, lens):
        bad = int(np.flatnonzero(covered != lens)[0])
        raise TensorError(f"{where}: the runs of sample {bad} cover {covered[bad]} tokens of {lens[bad]}")
    without = (np.bincount(runs[:, 0], minlength=len(lens)) == 0) & ~(unfinished & (lens == 0))
    if without.any():
        raise TensorError(f"{where}: sample {int(np.flatnonzero(without)[0])} has no version run")

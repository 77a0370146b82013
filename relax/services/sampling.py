"""From orders to requests, and from what the engine drew to the tensors of a group. Pure functions, no message.

Every group is treated as one that goes on: each of its samples has begun (a new one with nothing), is finished or is
not, and what the engine draws is joined to it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax.data.seeds import sample_seed
from relax.engines.base import FinishReason, Request, Result
from relax.protocol.messages import GroupOrder
from relax.protocol.tensors import FINISH_LENGTH, FINISH_STOP, UNFINISHED, SampledGroup, TensorError

_FINISH: dict[FinishReason, int] = {"stop": FINISH_STOP, "length": FINISH_LENGTH, "abort": UNFINISHED}
_REASON = {value: reason for reason, value in _FINISH.items()}


def begun(order: GroupOrder, options: Any) -> list[Result]:
    """The samples of a group as they are before this replica draws: as they were parked, or empty.

    A finish reason "abort" says that the sample goes on. Raises TensorError when what was parked contradicts itself.
    """
    n, lease = options.n_samples_per_prompt, order.lease
    ids = [f"{lease.group}.{lease.fence}.{i}" for i in range(n)]
    if order.parked is None:
        return [Result(name, np.empty(0, np.int32), np.empty(0, np.float32), "abort", ()) for name in ids]
    where = f"parked group {lease.group}"
    assert order.parked.arrays is not None, "what is parked elsewhere is pulled before"
    group = SampledGroup.from_arrays(order.parked.arrays, where, parked=True)
    if len(group.response_lens) != n:
        raise TensorError(f"{where}: it has {len(group.response_lens)} samples, a group has {n}")
    cuts = np.cumsum(group.response_lens)[:-1]
    tokens, logprobs = np.split(group.response_tokens, cuts), np.split(group.behaviour_logprobs, cuts)
    runs: list[list[tuple[int, int]]] = [[] for _ in ids]
    for sample, version, length in group.runs.tolist():
        runs[sample].append((version, length))
    return [
        Result(name, tokens[i], logprobs[i], _REASON[int(group.finish[i])], tuple(runs[i]))
        for i, name in enumerate(ids)
    ]


def requests(order: GroupOrder, samples: Sequence[Result], options: Any) -> list[Request]:
    """What the engine has to draw of a group whose samples have got so far: one request for each unfinished one."""
    o = options
    return [
        Request(
            id=sample.id,
            prompt=np.concatenate([order.prompt_tokens, sample.token_ids]),
            # Prompt and response have the same bound together wherever the sample goes on.
            max_tokens=o.rollout_max_response_len - len(sample.token_ids),
            temperature=o.rollout_temperature,
            top_p=o.rollout_top_p,
            top_k=o.rollout_top_k,
            seed=sample_seed(o.seed, order.epoch, order.prompt_id, i, order.lease.attempt, len(sample.token_ids)),
        )
        for i, sample in enumerate(samples)
        if sample.finish_reason == "abort"
    ]


def joined(samples: Sequence[Result], drawn: Sequence[Result]) -> list[Result]:
    """The samples with what was drawn for those of them that went on."""
    more = {result.id: result for result in drawn}
    return [_continued(sample, more[sample.id]) if sample.id in more else sample for sample in samples]


def _continued(sample: Result, more: Result) -> Result:
    runs = list(sample.runs)
    for version, length in more.runs:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + length)
        else:
            runs.append((version, length))
    return Result(
        id=sample.id,
        token_ids=np.concatenate([sample.token_ids, more.token_ids]),
        logprobs=np.concatenate([sample.logprobs, more.logprobs]),
        finish_reason=more.finish_reason,
        runs=tuple(runs),
    )


def finished(samples: Sequence[Result]) -> bool:
    return all(sample.finish_reason != "abort" for sample in samples)


def bundle(samples: Sequence[Result]) -> SampledGroup:
    """The tensors of a group; unfinished samples make it a parked one."""
    versions = [(i, version, n) for i, sample in enumerate(samples) for version, n in sample.runs]
    return SampledGroup(
        response_tokens=np.concatenate([sample.token_ids for sample in samples]),
        response_lens=np.array([len(sample.token_ids) for sample in samples], np.int32),
        behaviour_logprobs=np.concatenate([sample.logprobs for sample in samples]),
        finish=np.array([_FINISH[sample.finish_reason] for sample in samples], np.uint8),
        runs=np.array(versions, np.int64).reshape(-1, 3),
    )

"""Filters of groups, `--dynamic-sampling-filter-path module:function`: which groups are worth training on.

relax.algorithms.hooks says how a filter is called and what it returns. A group that is not wanted is dropped and
counted by reason, and its slot goes to another prompt. Imports no torch.
"""

import re
from typing import Any

import numpy as np

from relax.algorithms.hooks import FILTER

CONSTANT_REWARD = "constant_reward"
# A reason becomes the name of a metric and a value in the ledger.
_REASON = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")


def reward_is_not_constant(rewards: np.ndarray, **rest: Any) -> bool | str:
    """Wants groups in which two samples have different rewards: with equal ones every normalized advantage is 0."""
    scored = rewards[np.isfinite(rewards)]
    return True if len(scored) and scored.min() < scored.max() else CONSTANT_REWARD


def unwanted(
    options: Any, rewards: np.ndarray, response_lens: np.ndarray, truncated: np.ndarray, row: dict[str, Any]
) -> str | None:
    """Why the filter of this run does not want the group; None when it does, or when there is no filter.

    HookError when the filter raises, or returns what is neither a bool nor a reason.
    """
    path = FILTER.path(options)
    if path is None:
        return None
    try:
        answer = FILTER.call(
            options, rewards=rewards.copy(), response_lens=response_lens.copy(), truncated=truncated.copy(), row=row
        )
    except Exception as error:  # a function of the user may do anything
        raise FILTER.refuse(options, f"raised {type(error).__name__}: {error}") from error
    if isinstance(answer, bool | np.bool_):
        return None if answer else _named_after(path)
    if not isinstance(answer, str) or not _REASON.fullmatch(answer):
        told = "True to keep the group, False, or a reason of lower-case letters, digits and underscores"
        raise FILTER.refuse(options, f"returned {answer!r}; it must be {told}")
    return answer


def _named_after(path: str) -> str:
    """The reason of a filter that gives none: the name of its function."""
    return re.sub(r"[^a-z0-9]+", "_", path.rpartition(":")[2].lower()).strip("_")[:64] or "filtered"

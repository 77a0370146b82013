"""Functions of the user, `module:function`: a filter of groups, and others in place of the project's own.

A hook is called by keyword with the arguments below; it declares those names, or takes the ones it does not care for
as `**rest`. Each gets `options` (relax.config.Options) for its numbers. Tensors are right-padded, `mask` is 1 where a
token counts in the loss. What a hook returns is checked where it is used (`HookError`), and what it returns outside the
mask is never looked at. Importing this module imports no torch.

`--dynamic-sampling-filter-path`, before a group may become part of a batch:

    f(rewards, response_lens, truncated, row, options) -> bool | reason

    rewards float64 [n] (NaN where the reward function abstained), response_lens int32 [n] and truncated bool [n]
    (numpy) of one group, and the dataset's row as a dict. True keeps the group; a reason (a str of lower-case letters,
    digits and underscores) drops it, False too, with the function's name as the reason. Called for one group at a time,
    in a thread of advantages. A call that fails rejects the draw, as a reward function does: it is drawn again, and its
    prompt is set aside after the third time. `relax.algorithms.filters:reward_is_not_constant` is there already.

`--custom-reward-post-process-path`, in place of the reward normalizer:

    f(rewards, group_ids, options) -> scores

    rewards float64 [N] and group_ids int64 [N] (numpy) of a whole rollout batch, in any order; NaN where the reward
    function abstained. scores [N], finite for every scored sample; those of abstaining samples become 0. A group still
    needs as many scored samples as the algorithm's own normalizer, else it is dropped before.

`--custom-advantage-path`, in place of the advantage function, before whitening:

    f(scores, mask, group_ids, kl, values, options) -> advantages | (advantages, returns)

    scores float64 [N] (after the normalizer), mask bool [N, T], group_ids int64 [N], of a whole rollout batch. kl and
    values float64 [N, T], or None where the algorithm asks for none: k1 of behaviour against reference, and the
    critic's values. Returns [N, T], with `returns` too where a critic trains on them (ppo).

`--custom-loss-path`, in place of the policy loss:

    f(logp, old_logp, A, mask, options) -> losses.TokenLoss

    logp (with gradient), old_logp, A [B, T] of one micro-batch, already 0 outside mask (bool [B, T]). Returns values
    per token, before any weight; it neither masks nor reduces. Each of its `scalars` becomes a metric `train/<name>`.
    old_logp are proximal log-probs, from where the options say, whatever the algorithm's own loss would need.

`--custom-tis-path`, in place of the weight that `--use-tis` puts on the policy loss:

    f(old_logp, rollout_logp, mask, options) -> weight

    old_logp (proximal) and rollout_logp (behaviour) [B, T] of one micro-batch, 0 outside mask. weight [B, T]; it is
    detached.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from relax.config.fields import flag
from relax.config.violation import Violation
from relax.functions import FunctionError, load, load_usable

_IMPORT_SECONDS = 60.0


class HookError(FunctionError):
    """A hook whose result its caller cannot use. The text names it."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One of the places: the option that fills it, the service that calls it, and with which arguments."""

    option: str
    role: str
    arguments: tuple[str, ...]

    def path(self, options: Any) -> str | None:
        path: str | None = getattr(options, self.option)
        return path

    def call(self, options: Any, **arguments: Any) -> Any:
        """The result of the function that `options` name for this place."""
        path = self.path(options)
        assert path is not None, f"{self.option} is not set"
        return load(path)(**arguments, options=options)

    def refuse(self, options: Any, problem: str) -> HookError:
        return HookError(f"{flag(self.option)} {self.path(options)}: {problem}")


FILTER = Hook("dynamic_sampling_filter_path", "advantages", ("rewards", "response_lens", "truncated", "row", "options"))
REWARD_POST_PROCESS = Hook("custom_reward_post_process_path", "advantages", ("rewards", "group_ids", "options"))
ADVANTAGE = Hook("custom_advantage_path", "advantages", ("scores", "mask", "group_ids", "kl", "values", "options"))
LOSS = Hook("custom_loss_path", "actor", ("logp", "old_logp", "A", "mask", "options"))
TIS = Hook("custom_tis_path", "actor", ("old_logp", "rollout_logp", "mask", "options"))
HOOKS = (FILTER, REWARD_POST_PROCESS, ADVANTAGE, LOSS, TIS)


def usable(hook: Hook, path: str) -> None:
    """Raises FunctionError unless `path` can be imported and called with the arguments of `hook`."""
    load_usable(path, **dict.fromkeys(hook.arguments, "..."))


def check(options: Any, roles: Iterable[str]) -> list[Violation]:
    """Every reason why the hooks that services of `roles` would call cannot be used.

    They are imported in a child process, started as the services are: what a module does at import (torch, for most)
    stays out of this process, and `module` is looked for in the same places.
    """
    chosen = {hook: path for hook in HOOKS if hook.role in set(roles) and (path := hook.path(options)) is not None}
    if not chosen:
        return []
    command = [sys.executable, "-m", "relax.algorithms.hooks", *(f"{h.option}={path}" for h, path in chosen.items())]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
        problems = json.loads(child.stdout.rpartition(_MARK)[2].splitlines()[0]) if _MARK in child.stdout else None
        ended = f"its process ended during the import: {(child.stderr.strip() or 'no word why').splitlines()[-1]}"
    except subprocess.TimeoutExpired:
        problems, ended = None, f"not imported within {_IMPORT_SECONDS:.0f} s"
    return [
        Violation(flag(hook.option), path, problem, _fix(hook))
        for hook, path in chosen.items()
        if (problem := ended if problems is None else problems.get(hook.option))
    ]


def _fix(hook: Hook) -> str:
    return (
        "Give module:function, importable from the directory the run is started in (or on PYTHONPATH), "
        f"callable with the keywords {', '.join(hook.arguments)}."
    )


# Before the answer on stdout, since a user's module may print.
_MARK = "\x1drelax-hooks "


def _main(arguments: list[str]) -> None:
    problems = {}
    for argument in arguments:
        option, _, path = argument.partition("=")
        try:
            usable(next(hook for hook in HOOKS if hook.option == option), path)
        except FunctionError as error:
            problems[option] = str(error)
    print(_MARK + json.dumps(problems))


if __name__ == "__main__":
    _main(sys.argv[1:])

"""The algorithms, one `AlgorithmSpec` each. The registry validates a run, drives the advantages service and the actor.

Specs name their functions; the modules that hold them (and torch) are imported when a function is first called, so that
this module can be used wherever options are checked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from relax.algorithms import rules
from relax.config.violation import Violation
from relax.functions import load


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A pure function by name, and what it is given.

    `inputs` are tensors, by the names the caller offers them under, in the order of the function's parameters.
    `options` and `unless` map further parameters to the option of the run that sets them: its value, or its negation.
    """

    path: str  # module:function
    inputs: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    unless: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, offered: Mapping[str, Any], options: Any) -> Any:
        """Calls it with `inputs` taken from `offered`. KeyError names an input that is not there."""
        keywords = {parameter: getattr(options, option) for parameter, option in self.options.items()}
        keywords |= {parameter: not getattr(options, option) for parameter, option in self.unless.items()}
        return load(self.path)(*(offered[name] for name in self.inputs), **keywords)

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that change what it computes."""
        return (*self.options.values(), *self.unless.values())


@dataclass(frozen=True, slots=True, eq=False)
class AlgorithmSpec:
    """One algorithm.

    normalizer  rewards of one group -> scalars; offered `rewards`. At least `min_scored` samples must have a reward.
    advantage   scalars -> tokens; offered `scores` [B], `token_rewards` [B, T] (the score on the last valid token),
                `mask`, and `kl` (k1 of behaviour against reference) or `values` if it asks for them; returns
                advantages, or (advantages, returns).
    whitening   (ddof, floor) of the whitening that `normalize_advantages` switches on.
    loss        offered `logp`, `old_logp`, `A`, `mask`; returns a TokenLoss.
    ratio       the level at which the loss compares current with proximal log-probs; None when it does not.
    whole_batches  whether the short batch at the end of a stream of prompts cannot be trained.
    contract    what a run must satisfy: its options -> violations. `advice`: what the authors recommend -> differences.
    """

    name: str
    normalizer: Function
    advantage: Function
    loss: Function
    ratio: Literal["token", "sequence"] | None
    whitening: tuple[int, bool] = (1, False)
    min_scored: int = 1
    whole_batches: bool = False
    contract: Callable[[Any], list[Violation]] = rules.nothing
    advice: Callable[[Any], list[str]] = rules.no_advice

    @property
    def needs(self) -> frozenset[str]:
        """Services beside the usual ones: "critic" where the advantage asks for values, "reference" for the KL."""
        services = {"values": "critic", "kl": "reference"}
        return frozenset(services[name] for name in self.advantage.inputs if name in services)

    @property
    def option_names(self) -> frozenset[str]:
        """The options that this algorithm's own functions read."""
        return frozenset(self.normalizer.option_names + self.advantage.option_names + self.loss.option_names)

    @property
    def normalizes_rewards(self) -> bool:
        return self.normalizer is not RAW


def register(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Adds an algorithm. Raises ValueError when the name is taken."""
    if spec.name in _SPECS:
        raise ValueError(f"algorithm {spec.name!r} is registered already")
    _SPECS[spec.name] = spec
    return spec


def get(name: str) -> AlgorithmSpec:
    """The algorithm called `name`; ValueError names the nearest one when there is none."""
    if name in _SPECS:
        return _SPECS[name]
    near = get_close_matches(name, _SPECS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_SPECS)}."
    raise ValueError(f"unknown algorithm {name!r}: {hint}")


def names() -> tuple[str, ...]:
    """Every registered algorithm, in registry order."""
    return tuple(_SPECS)


_MODULE = "relax.algorithms"


def _same(*options: str) -> dict[str, str]:
    return {name: name for name in options}


def _prefixed(prefix: str, *parameters: str) -> dict[str, str]:
    return {name: prefix + name for name in parameters}


RAW = Function(f"{_MODULE}.normalizers:raw", ("rewards",))
GROUP_MEAN_STD = Function(
    f"{_MODULE}.normalizers:group_mean_std", ("rewards",), unless={"use_std": "disable_grpo_std_normalization"}
)
GROUP_MEAN = Function(f"{_MODULE}.normalizers:group_mean", ("rewards",))
LEAVE_ONE_OUT = Function(f"{_MODULE}.normalizers:leave_one_out", ("rewards",))

BROADCAST = Function(f"{_MODULE}.advantages:broadcast", ("scores", "mask"))
RETURNS = Function(
    f"{_MODULE}.advantages:reinforce_plus_plus_returns", ("scores", "kl", "mask"), _same("kl_coef", "gamma")
)
GAE = Function(f"{_MODULE}.advantages:gae", ("token_rewards", "values", "mask"), _same("gamma", "lambd"))

_RATIO = ("logp", "old_logp", "A")
_EPS = ("eps_clip", "eps_clip_high")
PPO_CLIP = Function(f"{_MODULE}.losses:ppo_clip", _RATIO, _same(*_EPS, "eps_clip_c"))
GSPO = Function(f"{_MODULE}.losses:gspo", (*_RATIO, "mask"), _same(*_EPS))
CISPO = Function(f"{_MODULE}.losses:cispo", _RATIO, _same(*_EPS))
SAPO = Function(f"{_MODULE}.losses:sapo", _RATIO, _prefixed("sapo_", "tau_pos", "tau_neg"))
M2PO = Function(f"{_MODULE}.losses:m2po", _RATIO, _prefixed("m2po_", "kl2_budget", "miniclip_low", "miniclip_high"))
RLOO = Function(f"{_MODULE}.losses:rloo", ("logp", "A"))

_SPECS: dict[str, AlgorithmSpec] = {}

for _spec in (
    AlgorithmSpec("grpo", GROUP_MEAN_STD, BROADCAST, PPO_CLIP, "token"),
    AlgorithmSpec("gspo", GROUP_MEAN_STD, BROADCAST, GSPO, "sequence"),
    AlgorithmSpec("cispo", GROUP_MEAN_STD, BROADCAST, CISPO, "token", advice=rules.cispo_advice),
    AlgorithmSpec("sapo", GROUP_MEAN_STD, BROADCAST, SAPO, "token"),
    AlgorithmSpec("m2po", RAW, BROADCAST, M2PO, "token", contract=rules.m2po, advice=rules.m2po_advice),
    AlgorithmSpec("rloo", LEAVE_ONE_OUT, BROADCAST, RLOO, None, min_scored=2, whole_batches=True, contract=rules.rloo),
    AlgorithmSpec("ppo", RAW, GAE, PPO_CLIP, "token", contract=rules.ppo),
    AlgorithmSpec(
        "reinforce_plus_plus", RAW, RETURNS, PPO_CLIP, "token", (0, True), contract=rules.reinforce_plus_plus
    ),
    AlgorithmSpec(
        "reinforce_plus_plus_baseline",
        GROUP_MEAN,
        BROADCAST,
        PPO_CLIP,
        "token",
        (0, True),
        min_scored=2,
        contract=rules.reinforce_plus_plus_baseline,
    ),
):
    register(_spec)

"""Values of options that follow from others when the user does not give them."""

from collections.abc import Callable, Mapping
from typing import Any


def derived_values(given: Mapping[str, Any], default: Callable[[str], Any]) -> dict[str, Any]:
    """A value for every option that can be derived and is not in `given`.

    Values are taken as typed (strings from flags, numbers from YAML). One that is not a number yields a harmless
    stand-in here, because its own field refuses it in the same pass.
    """

    def whole(name: str) -> int:
        return int(_number(given.get(name, default(name)), 1))

    samples = whole("rollout_batch_size") * whole("n_samples_per_prompt")
    steps = max(1, samples // max(1, whole("global_batch_size"))) if "global_batch_size" in given else 1
    steps = max(1, whole("num_steps_per_rollout")) if "num_steps_per_rollout" in given else steps
    slots = whole("sim_slots") if "sim_slots" in given else whole("rollout_max_num_seqs")
    values = {
        "num_steps_per_rollout": steps,
        "global_batch_size": max(1, samples // steps),
        "rollout_lead": max(0, min(whole("max_staleness"), 2)),
        "rollout_credit": max(1, slots // max(1, whole("n_samples_per_prompt"))),
        "sim_slots": max(1, whole("rollout_max_num_seqs")),
        "eps_clip_high": abs(_number(given.get("eps_clip", default("eps_clip")), 0.2)),
        "critic_lr": abs(_number(given.get("lr", default("lr")), 0.0)),
    }
    if given.get("num_rollout") is not None:
        values["lr_decay_steps"] = max(1, (whole("num_rollout") - whole("num_critic_only_steps")) * steps)
    return {name: value for name, value in values.items() if name not in given}


def _number(value: Any, otherwise: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return otherwise
    return number if abs(number) < float("inf") else otherwise

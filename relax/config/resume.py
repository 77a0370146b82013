"""Which options a resumed run must share with the life before, so that it is the same run."""

from collections.abc import Iterator, Mapping
from typing import Any

import xxhash
import yaml

from relax.config.fields import extra, flag
from relax.config.options import PER_SERVICE, Options
from relax.config.violation import Violation

# What says how a run is watched, kept and named, not what it trains.
FREE = PER_SERVICE | {
    "run_name",
    "restart",
    "no_load_optim",
    "no_load_rng",
    "save",
    "save_interval",
    "keep_checkpoints",
    "startup_timeout",
    "peer_timeout",
    "stall_timeout",
    "restart_budget",
    "insecure",
}
# The ends of a run: they may be set later, never earlier. None is no end.
ENDS = ("num_rollout", "num_epoch")


def fixed(options: Options) -> dict[str, Any]:
    """The options that every life of a run shares, as JSON values."""
    values = options.model_dump(mode="json")
    names = Options.model_fields.keys() - FREE - {*ENDS}
    if options.lr_decay_style == "constant":
        names -= {"lr_decay_steps"}  # it follows from the end, and nothing follows from it
    return {name: values[name] for name in sorted(names) if not extra(Options.model_fields[name]).unavailable}


def fingerprint(options: Options) -> str:
    """A digest of `fixed`, 32 hex digits."""
    return xxhash.xxh3_128(yaml.safe_dump(fixed(options), sort_keys=True).encode()).hexdigest()


def differences(
    before: Mapping[str, Any], source: str, options: Options, cut: int, *, exported: bool = True, ended: bool = False
) -> Iterator[Violation]:
    """Why a run with the options `before` (as in config.yaml, at `source`) cannot go on with `options` at batch `cut`:
    one violation for each that differs. A run that is trained to its end may go on until its model is `exported`; one
    that `ended` well, when its end is moved."""
    for name, value in fixed(options).items():
        # An option that is younger than that run had its default.
        old = before.get(name, Options.model_fields[name].default if name not in before else None)
        if old == value:
            continue
        fix = f"Give {flag(name)} {_text(old)}." if old is not None else f"Leave {flag(name)} out."
        if name == "lr_decay_steps" and not options.is_set(name):
            fix = f"It follows from --num-rollout; give {flag(name)} {_text(old)} to keep the schedule."
        yield Violation(flag(name), value, f"the run that is resumed has {_text(old)} ({source})", fix)
    for name in ENDS:
        old, new = before.get(name), getattr(options, name)
        if new is not None and (old is None or new < old):
            problem = f"the run that is resumed has {_text(old)} ({source}), and its end may only be moved further"
            fix = f"Leave {flag(name)} out." if old is None else f"Give {flag(name)} {old} or more."
            yield Violation(flag(name), new, problem, fix)
    if options.num_rollout is not None and (options.num_rollout < cut or (exported and options.num_rollout == cut)):
        problem = f"the run is finished: batch {cut - 1} is trained and saved"
        yield Violation(
            flag("num_rollout"), options.num_rollout, problem, "Give more batches to go on; the model is in export/."
        )
    elif ended and all(before.get(name) == getattr(options, name) for name in ENDS):
        name = next(name for name in ENDS if getattr(options, name) is not None)
        problem, fix = "the run is finished: it ended well", f"Give a larger {flag(name)} to go on."
        yield Violation(flag(name), getattr(options, name), problem, fix)


def _text(value: object) -> str:
    return "none" if value is None else str(value)

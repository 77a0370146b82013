"""From a run's options and topology to the settings that are planned."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax.config.checks import check_options, located
from relax.config.fields import flag
from relax.config.flags import Given
from relax.config.options import Options
from relax.config.resolve import Resolved, accepted, resolve
from relax.config.simulated import is_simulated
from relax.config.tail import prompt_count
from relax.config.violation import ConfigError, Violation
from relax.planner.draws import Lengths
from relax.planner.setting import Setting
from relax.simulation.checks import check as check_simulation
from relax.simulation.lengths import LengthModel
from relax.simulation.speed import SpeedModel

SWEEP = (0, 1, 2, 4, 8)
# What stands for the machines. Their defaults are those of a simulated run; for a real one nobody knows them but its
# user.
MEASURED = ("sim_length", "sim_tokens_per_second", "sim_train_seconds")


@dataclass(frozen=True, slots=True)
class Inputs:
    """`settings` is what is planned, in the order of the table; `own` is the run as it is configured; `notes` say which
    points of the sweep make no run or not quite this one, and why."""

    resolved: Resolved
    own: Setting
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    lengths: Lengths
    prompts: int

    @property
    def path(self) -> Path:
        assert self.resolved.topology is not None
        return self.resolved.topology.path

    @property
    def options(self) -> Options:
        return self.resolved.options


def read(given: Given) -> Inputs:
    """Checks a run and its sweep as the launcher would, but for what needs the machines of the run. Raises ConfigError
    with every reason."""
    own = given.own
    # Arguments that are none came back as their refusals, so that all of them are told.
    faults = [value for value in vars(own).values() if isinstance(value, Violation)]
    resolved = resolve(given.options, own.topology, [*given.violations, *faults], given.suspects)
    resolved = accepted(resolved, _checks, _models, lambda _: [*_picture(own.plot), *_place(own.plot, own.json)])
    options = resolved.options
    prompts = own.prompts or prompt_count(options)
    if prompts is None:
        problem = "cannot be opened here, and the order of the prompts follows from their number"
        fix = "Give the number with --prompts N, or the path of the data."
        raise ConfigError([Violation("--prompt-data", options.prompt_data, problem, fix)])
    lengths = Lengths(
        LengthModel.parse(options.sim_length),
        seed=options.seed,
        prompts=prompts,
        samples=options.n_samples_per_prompt,
        longest=options.rollout_max_response_len,
        epochs=options.num_epoch,
    )
    setting = _setting(resolved, own)
    points = _points(options, setting, own)
    settings = tuple(point for point in points if point.problem is None)
    notes = [f"{point} is left out: {point.problem}" for point in points if point.problem is not None]
    notes += _without(setting, settings)
    if not settings:
        raise ConfigError([Violation("--sweep-staleness", _text(own.sweep_staleness), notes[0], "Plan others.")])
    return Inputs(resolved, setting, settings, tuple(notes), lengths, prompts)


def _checks(resolved: Resolved) -> Iterator[Violation]:
    # The launcher refuses --sim-... where no engine is simulated; here they are what is asked. And no port is opened.
    other = ("--sim-", "--keys", "--insecure")
    yield from (v for v in check_options(resolved) if not v.option.startswith(other))
    if is_simulated(resolved.topology):
        return
    for name in MEASURED:
        if not resolved.options.is_set(name) and name not in resolved.suspects:
            problem = "is needed to plan a run whose engines are real"
            fix = f"Give {flag(name)}, as measured in a short run: see docs/topologies.md."
            yield Violation(flag(name), "", problem, fix)


def _models(resolved: Resolved) -> list[Violation]:
    assert resolved.topology is not None
    return located(resolved, check_simulation(resolved.options, len(resolved.topology.role("rollout"))))


def _picture(path: Path | None) -> Iterator[Violation]:
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        yield Violation("--plot", str(path), "is no kind of picture", "Name a .png, .svg or .pdf file.", "flag")


def _place(plot: Path | None, record: Path | None) -> Iterator[Violation]:
    """A plan may take minutes, which are lost where its result finds no place."""
    for name, path in (("--plot", plot), ("--json", record)):
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            yield Violation(name, str(path), "its directory does not exist", "Create it first.", "flag")
        elif path.is_dir():
            yield Violation(name, str(path), "is a directory", "Name a file.", "flag")
        elif not os.access(path if path.exists() else folder, os.W_OK):
            yield Violation(name, str(path), "cannot be written", "Name a file that can.", "flag")


def _setting(resolved: Resolved, own: argparse.Namespace) -> Setting:
    options = resolved.options
    assert resolved.topology is not None
    names = tuple(service.name for service in resolved.topology.role("rollout"))
    speed = SpeedModel.parse(options.sim_tokens_per_second)
    return Setting(
        replicas=names,
        speeds=tuple(speed.of(i) for i in range(len(names))),
        slots=options.sim_slots,
        credit=options.rollout_credit,
        batch_size=options.rollout_batch_size,
        samples=options.n_samples_per_prompt,
        max_staleness=options.max_staleness,
        lead=options.rollout_lead,
        train_seconds=options.sim_train_seconds,
        batches=options.num_rollout,
        publish_seconds=options.sim_publish_seconds,
        load_seconds=own.load_seconds,
        score_seconds=own.score_seconds,
        hop_seconds=own.hop_seconds,
        interval=options.update_weights_interval,
        straggler_timeout=options.straggler_timeout,
        partial_rollout=options.partial_rollout,
        mask_offpolicy=options.mask_offpolicy_in_partial_rollout,
        over_sampling=options.over_sampling_batch_size,
    )


def _points(options: Options, setting: Setting, own: argparse.Namespace) -> list[Setting]:
    """The settings of the sweep, each once, by staleness and lead."""
    bounds = own.sweep_staleness or sorted({*SWEEP, options.max_staleness})
    leads = own.sweep_lead or ([options.rollout_lead] if options.is_set("rollout_lead") else [2])
    points = [setting.at(bound, lead) for bound in bounds for lead in leads]
    return sorted(dict.fromkeys(points), key=lambda point: (point.max_staleness, point.lead))


def _without(setting: Setting, points: Sequence[Setting]) -> Iterator[str]:
    if setting.partial_rollout and any(not point.partial_rollout for point in points):
        yield "S = 0 is planned without --partial-rollout, which cannot act there"
    if setting.over_sampling is not None and any(point.over_sampling is None for point in points):
        yield "S > 0 is planned without --over-sampling-batch-size, which cannot act there"
    if setting.straggler_timeout is not None and any(point.straggler_timeout is None for point in points):
        yield "L = 0 is planned without --straggler-timeout 0, which cannot act there"


def _text(numbers: list[int] | None) -> str:
    return ",".join(map(str, numbers or ()))

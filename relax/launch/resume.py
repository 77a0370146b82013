"""Which run a resume goes on with, from where, and whether it may: all that is checked before anything is touched."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from relax.checkpoints import Checkpoint, CheckpointDirectory
from relax.config.budget import RestartBudget
from relax.config.options import NEWEST, Options
from relax.config.resume import differences
from relax.config.violation import ConfigError, Violation, refuse
from relax.launch.outcome import last
from relax.launch.rundir import RECORD, RunDir, resume_refusals

OPTION = "--resume"


def named(options: Options, directory: Path) -> Path | None:
    """The directory of the run that is to go on; None where a new one begins. `directory` is where runs are numbered.

    Raises ConfigError when the newest run is meant and there is none.
    """
    if options.resume is None:
        return None
    if options.run_dir is not None:
        return options.run_dir
    return newest_run(directory, options.run_name) if options.resume == Path(NEWEST) else options.resume


@dataclass(frozen=True, slots=True)
class Resumption:
    """The run at `path` goes on at batch `cut`, from `checkpoint`; from the beginning where there is none. `lineage` is
    the one that begins."""

    path: Path
    checkpoint: Checkpoint | None
    lineage: int

    @property
    def cut(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.batch

    def __str__(self) -> str:
        made, how = self.checkpoint, f"(lineage {self.lineage})"
        if made is None:
            return f"{self.path} has no complete checkpoint: the run begins anew at batch 0 {how}"
        return f"{self.path} goes on at batch {self.cut}, from {made.path} of {made.created_at} {how}"


def misfits(options: Options) -> Iterator[Violation]:
    """Options about a resume that do not fit each other, or without one have nothing to say. For the launcher alone:
    the services find in the run's directory what they go on from."""
    path, directory = options.resume, options.run_dir
    given = path if path != Path(NEWEST) else None
    if given is not None and directory is not None and given.absolute() != directory.absolute():
        problem = f"is another directory than --run-dir {directory}, and a run goes on where it is"
        yield refuse(options, "resume", problem, "Give one of them.")
    for name in ("no_load_optim", "no_load_rng"):
        if getattr(options, name) and path is None and options.load is None:
            yield refuse(
                options, name, "cannot act: without --resume or --load no checkpoint is loaded", "Leave it out."
            )


def restart_acts(options: Options, hosts: bool) -> Iterator[Violation]:
    """Whether --restart can do what it says. `hosts`: the run is on several."""
    if not options.restart:
        return
    if not options.save:
        yield refuse(options, "restart", "cannot act: --no-save leaves nothing to go on from", "Leave one of them out.")
    if RestartBudget.parse(options.restart_budget).restarts == 0:
        problem = f"cannot act: --restart-budget {options.restart_budget} allows no restart"
        yield refuse(options, "restart", problem, "Allow some, or leave it out.")
    if hosts:
        problem = "cannot act: the launcher of each host ends with the run"
        yield refuse(options, "restart", problem, "Leave it out, and start every host again with --resume.")
    if options.no_load_optim or options.no_load_rng:
        problem = "does not go with --no-load-optim and --no-load-rng: it would do without them each time"
        yield refuse(options, "restart", problem, "Leave it out in the launch that loads without a part.")


def newest_run(directory: Path, name: str) -> Path:
    """The run of the highest number, for a --resume that names none. Raises ConfigError when there is no run."""
    taken = (
        (int(match[1]), entry)
        for entry in (directory.iterdir() if directory.is_dir() else ())
        if (match := re.fullmatch(re.escape(name) + r"-(\d+)", entry.name)) and (entry / RECORD).is_file()
    )
    newest = max(taken, default=None)
    if newest is None:
        problem = f"names no run, and {directory} holds none called {name}-<n>"
        raise ConfigError([Violation(OPTION, NEWEST, problem, f"Give {OPTION} RUN_DIR.")])
    return newest[1].absolute()


def find(path: Path, options: Options) -> Resumption:
    """What `options` may go on with at `path`. Reads the newest checkpoint to its last byte; one that is damaged is
    named in a warning and the one before is taken.

    Raises ConfigError with every reason why not: there is no run, a checkpoint is of another one, or options differ
    that must not (each named, with both values).
    """
    run = RunDir.load(path, OPTION)
    checkpoint = CheckpointDirectory(run.checkpoints_dir).newest()
    found = Resumption(run.path, checkpoint, run.lineage + 1)
    if checkpoint is not None and checkpoint.run_id != run.run_id:
        problem = f"{checkpoint.path} is a checkpoint of run {checkpoint.run_id}, the directory is of {run.run_id}"
        raise ConfigError([Violation(OPTION, str(path), problem, "Put the run's own checkpoints there.")])
    exported, end = run.export_dir.exists(), last(run)
    before, ended = _before(run), end is not None and end.code == 0
    refused = resume_refusals(run)
    refused += differences(before, str(run.config), options, found.cut, exported=exported, ended=ended)
    if refused:
        raise ConfigError(refused)
    return found


def newest_marked(run: RunDir) -> Checkpoint | None:
    """The checkpoint that a resume would look at first, by its marker. What an earlier life left beyond the cut of the
    present one is damaged: it began before it."""
    marked = CheckpointDirectory(run.checkpoints_dir).marked()
    return next((made for made in marked if made.lineage == run.lineage or made.batch <= run.cut), None)


def _before(run: RunDir) -> Mapping[str, Any]:
    """The options of the life before."""
    try:
        before = yaml.safe_load(run.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        before = error
    if not isinstance(before, dict):
        problem = f"{run.config} cannot be read: {before}"
        raise ConfigError([Violation(OPTION, str(run.path), problem, "Restore it: it tells the options of the run.")])
    return before

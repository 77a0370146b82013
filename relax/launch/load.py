"""What a new run is loaded from (--load): a checkpoint of another run, found, read and compared before anything starts.

Taken over are the weights of actor and critic, and of a reference that this run refreshes, with Adam's moments and the
random generators of every rank. What is counted begins anew: batches, versions, optimizer steps and with them the
schedule, and the position in the data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from relax.algorithms.contracts import models_saved
from relax.checkpoints import Checkpoint, CheckpointDirectory, CheckpointError, read_checkpoint, read_marker
from relax.config.options import Options
from relax.config.resolve import Resolved
from relax.config.violation import ConfigError, Violation
from relax.launch.fit import unfit
from relax.launch.rundir import RECORD, RunDir

OPTION = "--load"
FIX = "Name a checkpoint, e.g. runs/local-1/checkpoints/40, or the directory of a run that has one."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run begins with. `models` are the roles whose part is taken over."""

    checkpoint: Checkpoint
    models: tuple[str, ...]
    options: Options

    def __str__(self) -> str:
        made, o = self.checkpoint, self.options
        taken = ["weights"]
        taken += [] if o.no_load_optim else ["optimizer"]
        taken += [] if o.no_load_rng else ["random generators"]
        left = [name for name in ("critic", "reference") if name in made.parts and name not in self.models]
        unused = f"; its {' and '.join(left)} is not used" if left else ""
        return (
            f"{made.path} of {made.created_at}: {', '.join(taken)} of {', '.join(self.models)}{unused}; "
            "steps, schedule and data begin anew"
        )


def find_origin(resolved: Resolved, node: str | None) -> Origin | None:
    """The checkpoint that --load names, read to its last byte; of a run the newest that is complete. None on a node
    without a model.

    Raises ConfigError when there is none, or it does not fit this run: with every reason.
    """
    options, topology = resolved.options, resolved.topology
    assert options.load is not None and topology is not None
    if topology.spans_hosts and _is_run(options.load):
        raise _refused(options.load, "is a run, and its newest checkpoint may be another one on each host")
    here = {service.role for service in topology.on(node)}
    models = tuple(role for role in models_saved(options) if role in here)
    if not models:
        return None
    made = _read(options.load, _newest if _is_run(options.load) else read_checkpoint)
    # A run that refreshes its reference may begin with --ref-load, where the other did not.
    models = tuple(role for role in models if role != "reference" or role in made.parts)
    if refused := list(unfit(made, resolved, models, OPTION)):
        raise ConfigError(refused)
    return Origin(made, models, options)


def check_marked(path: Path) -> None:
    """Raises ConfigError where `path` is no checkpoint, by its marker."""
    if _is_run(path):
        raise _refused(path, "is a run, and its newest checkpoint may be another one for each service")
    _read(path, read_marker)


def _is_run(path: Path) -> bool:
    return (path / RECORD).is_file()


def _newest(run: Path) -> Checkpoint:
    directory = RunDir.load(run, OPTION).checkpoints_dir
    made = CheckpointDirectory(directory).newest()
    if made is None:
        raise CheckpointError(f"{directory} holds no complete checkpoint")
    return made


def _read(path: Path, read: Callable[[Path], T]) -> T:
    if not path.is_dir():
        raise _refused(path, "is a file" if path.exists() else f"does not exist; relative paths start at {Path.cwd()}")
    try:
        return read(path)
    except (CheckpointError, OSError) as error:
        fix = FIX
        if (path / "config.json").is_file():
            fix = "It looks like a Hugging Face model: begin with it by --hf-checkpoint."
        elif inside := [str(made.path) for made in CheckpointDirectory(path).marked()]:
            fix = f"Name one of those in it: {', '.join(inside)}."
        raise _refused(path, str(error), fix) from None


def _refused(path: Path, problem: str, fix: str = FIX) -> ConfigError:
    return ConfigError([Violation(OPTION, str(path), problem, fix)])

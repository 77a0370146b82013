"""Checkpoints of a model: what every rank holds of it at one moment, written while it goes on; and its way back.

A checkpoint of a model is one part (see `relax.checkpoints.parts`):

    state.json                    what it is, steps taken, the grid, and what the caller adds
    model-00000.safetensors       this rank's shards of the weights
    optimizer-00000.safetensors   Adam's moments, and the float32 copies of bfloat16 weights
    rng-00000.safetensors         this rank's random generators
    parts.json                    the list of all files, last

No file is pickled. The schedule needs no file: its rate is a function of the number of steps.

**What holds.** On the grid that wrote it, a model that is loaded goes on bit for bit as the one that was saved. On
another one weights and moments are the same, bit for bit, but sums run in another order from then on; and the
generators are to be done without, as there is no rank whose states would be the right ones.
"""

import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from relax.checkpoints import durable, parts
from relax.checkpoints.model_state import GRID, STATE, ModelState, grid_text
from relax.checkpoints.parts import File, PartError
from relax.megatron import exchange, parallel, rng, shards
from relax.megatron.checkpoint import CheckpointError
from relax.megatron.learner import Learner
from relax.megatron.network import Network
from relax.megatron.shards import Shard, StoredShards
from relax.megatron.staging import host_memory


class SaveError(exchange.InStepError):
    """A checkpoint could not be written; the text names rank, host, file and bytes. What was written is removed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a model took over. `about`: the caller's own entry. `optimizer`, `generators`: whether those are the saved
    ones. `steps`: optimizer steps taken."""

    about: Mapping[str, Any]
    steps: int
    optimizer: bool
    generators: bool


class Snapshot:
    """A copy of this rank's part of a model in host memory, and the way from there to a checkpoint.

        empty -> take -> taken -> write -> empty

    `take` is all that training waits for. `write` needs no thread but its own and meets no collective of training. One
    save is under way at a time: a snapshot that was not written is not taken again, except after `drop`. Made by all
    ranks together; every method but `drop` is collective.
    """

    def __init__(self, network: Network, learner: Learner[Any] | None = None) -> None:
        """`learner`: the one that trains `network`, if there is one."""
        self._network, self._learner = network, learner
        self._group = parallel.new_group() if network.grid.world > 1 else None
        self._held: dict[str, list[Shard]] = {}  # kind -> copies
        self._rng: tuple[dict[str, torch.Tensor], dict[str, str]] = ({}, {})
        self._state: ModelState | None = None

    def reserve(self) -> int:
        """Allocates the host memory, which the first `take` would otherwise do; returns the bytes of a checkpoint, over
        all ranks: its files are a little larger."""
        return self._reserve(_live(self._network, self._learner))

    def take(self, about: dict[str, Any] | None = None) -> int:
        """Copies the present state, which may change as soon as this returns; returns what `reserve` does.

        `about`: JSON values that the checkpoint holds for the caller. Raises RuntimeError when the last one was not
        written.
        """
        if self._state is not None:
            raise RuntimeError("the snapshot before is not written yet: one save is under way at a time")
        live = _live(self._network, self._learner)
        size = self._reserve(live)
        for kind, given in live.items():
            for copy, shard in zip(self._held[kind], (shard for shard in given if shard.main), strict=True):
                copy.tensor.copy_(shard.tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._rng = rng.take()
        self._state = replace(_describe(self._network, self._learner), about=about or {})
        return size

    def drop(self) -> None:
        """Forgets what was taken."""
        self._state = None

    def write(self, directory: Path) -> dict[str, File]:
        """Writes what was taken to a directory that all ranks share, and returns its files, all synced.

        The directory is new or empty; its own name in the directory above is the caller's to sync. Raises SaveError, on
        every rank, with nothing left but the directory.
        """
        if self._state is None:
            raise RuntimeError("nothing was taken that could be written")
        written: dict[str, File] = {}
        try:
            state = self._state
            self._agree(lambda: self._write_own(directory, state, written))
            tables = exchange.gather({name: asdict(file) for name, file in written.items()}, self._group)
            files = {name: File(**file) for table in tables for name, file in table.items()}
            first = self._network.grid.rank == 0
            self._agree(lambda: _close(directory, files) if first else None)
            return files
        except SaveError:
            for name in written:
                (directory / name).unlink(missing_ok=True)
            raise
        finally:
            self._state = None

    def _reserve(self, live: dict[str, list[Shard]]) -> int:
        """Places in host memory for what this rank writes of `live`; those of the last time are taken again."""
        known = {kind: {shard.name: shard for shard in held} for kind, held in self._held.items()}
        self._held = {
            kind: [_place(shard, known.get(kind, {})) for shard in given if shard.main] for kind, given in live.items()
        }
        own = sum(shard.tensor.nbytes for held in self._held.values() for shard in held)
        return sum(exchange.gather(own, self._group))

    def _write_own(self, directory: Path, state: ModelState, written: dict[str, File]) -> None:
        rank = self._network.grid.rank
        directory.mkdir(parents=True, exist_ok=True)
        for kind, held in self._held.items():
            if held:
                name = _file_name(kind, rank)
                written[name] = shards.write_shards(directory / name, held)
        name = _file_name("rng", rank)
        written[name] = shards.write_tensors(directory / name, *self._rng)
        if rank == 0:
            written[STATE] = state.write(directory)
        durable.sync(directory)

    def _agree(self, act: Callable[[], None]) -> None:
        """Every rank acts, and all raise SaveError when one of them could not."""
        failed = None
        try:
            act()
        except (OSError, PartError) as error:
            failed = f"rank {self._network.grid.rank} on {socket.gethostname()}: {_explain(error)}"
        if failures := [text for text in exchange.gather(failed, self._group) if text]:
            raise SaveError(f"the checkpoint of the model is not written: {'; '.join(failures)}")


def load(
    directory: Path,
    network: Network,
    learner: Learner[Any] | None = None,
    *,
    optimizer: bool = True,
    generators: bool = True,
    steps: bool = True,
) -> Loaded:
    """Takes over a checkpoint, in place. Collective; nothing is changed when it raises, on any rank.

    Without `optimizer` (--no-load-optim) the learner begins its steps and its schedule anew, with these weights; a
    network without learner has none to load. Without `steps` (a new run) they begin anew too, with the moments of the
    checkpoint. Without `generators` (--no-load-rng) they stay as they are. Raises CheckpointError naming the file,
    tensor or setting. Sizes of files are checked, their digests are not: see `parts.verify`.
    """
    grid = network.grid
    optimizer = optimizer and learner is not None
    stored: dict[str, StoredShards] = {}
    live: dict[str, list[Shard]] = {}
    states: tuple[dict[str, torch.Tensor], dict[str, str]] | None = None
    state: ModelState

    def prepare() -> dict[str, list[str]]:
        nonlocal state, states
        state = ModelState.read(directory)
        _check_state(directory, state, network)
        if optimizer and state.updates is None:
            raise CheckpointError(f"{directory} holds no optimizer state{_HINT['optimizer']}")
        files = parts.read_list(directory)
        kinds = {"model", "optimizer"} if optimizer else {"model"}
        live.update(_live(network, learner if optimizer else None))
        for kind in sorted(kinds):
            names = [name for name in files if name.startswith(f"{kind}-")]
            _check_files(directory, names, files, kind)
            stored[kind] = StoredShards(directory / name for name in names)
            stored[kind].check(live[kind])
        if generators:
            if state.grid != (own := _grid(network)):
                apart = f"was written on {grid_text(state.grid)}, this model is on {grid_text(own)}"
                raise CheckpointError(f"{directory} {apart}, and random generators belong to a rank{_HINT['rng']}")
            name = _file_name("rng", grid.rank)
            _check_files(directory, [name], files, "rng")
            states = _read_rng(directory / name)
        return {kind: sorted(shard.key for shard in live[kind]) for kind in kinds}

    for kind, wanted in _all_can(prepare).items():
        if unknown := sorted(stored[kind].keys - wanted):
            raise CheckpointError(f"{directory} holds {unknown[0]}, which this model does not have")
    for kind in stored:
        stored[kind].read(live[kind])
    if learner is not None:
        going_on = optimizer and steps
        learner.steps, learner.skipped_steps = (state.steps or 0, state.skipped_steps or 0) if going_on else (0, 0)
        if optimizer:
            learner.optimizer.updates = state.updates or 0
        else:
            learner.optimizer.restart()
    if states is not None:
        rng.put(*states)
    return Loaded(state.about, 0 if learner is None else learner.steps, optimizer, states is not None)


# --- what a checkpoint holds ---------------------------------------------------------------------------------------


def _live(network: Network, learner: Learner[Any] | None) -> dict[str, list[Shard]]:
    """kind of file -> this rank's shards, views of the live tensors."""
    model = network.model.sharded_state_dict()
    moments = learner.optimizer.sharded_state(model) if learner is not None else None
    found = {"model": shards.shards_of(model)}
    return found if moments is None else found | {"optimizer": shards.shards_of(moments)}


def _place(shard: Shard, buffers: dict[str, Shard]) -> Shard:
    """A place in host memory for a copy of `shard`, from `buffers` if there is one."""
    known = buffers.get(shard.name)
    if known is not None and known.tensor.shape == shard.tensor.shape and known.tensor.dtype == shard.tensor.dtype:
        return known
    return Shard(shard.key, shard.whole, shard.offset, host_memory(shard.tensor), shard.main, shard.padded)


def _describe(network: Network, learner: Learner[Any] | None) -> ModelState:
    return ModelState(
        network=type(network).__name__,
        architecture=asdict(network.architecture),
        dtype=str(network.config.params_dtype).removeprefix("torch."),
        grid=_grid(network),
        steps=None if learner is None else learner.steps,
        skipped_steps=None if learner is None else learner.skipped_steps,
        updates=None if learner is None else learner.optimizer.updates,
    )


def _grid(network: Network) -> dict[str, Any]:
    return {name: getattr(network.grid, name) for name in GRID}


def _file_name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


# --- writing -------------------------------------------------------------------------------------------------------


def _close(directory: Path, files: dict[str, File]) -> None:
    """The list, once rank 0 sees all that the others wrote."""
    for name, file in files.items():
        try:
            parts.check_size(directory, name, file)
        except PartError as error:
            raise PartError(f"{error}, as rank 0 sees it: all ranks must write to one file system") from None
    parts.write_list(directory, files)


def _explain(error: OSError | PartError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    text = f"{error.strerror}: {error.filename}"
    try:
        return f"{text} ({shutil.disk_usage(Path(error.filename).parent).free} bytes are free)"
    except (OSError, TypeError):
        return text


# --- reading -------------------------------------------------------------------------------------------------------

_HINT = {
    "model": "",
    "optimizer": "; --no-load-optim goes on with a fresh optimizer",
    "rng": "; --no-load-rng goes on with the generators of the seed",
}


def _check_state(directory: Path, state: ModelState, network: Network) -> None:
    ours = _describe(network, None)
    pairs = [(name, getattr(state, name), getattr(ours, name)) for name in ("network", "dtype")]
    pairs += [(name, state.architecture.get(name), value) for name, value in ours.architecture.items()]
    for name, theirs, own in pairs:
        if theirs != own:
            hint = "; see --train-dtype" if name == "dtype" else ""
            raise CheckpointError(f"{directory / STATE}: {name} is {theirs!r}, this model's is {own!r}{hint}")


def _check_files(directory: Path, names: Iterable[str], files: dict[str, File], kind: str) -> None:
    """Raises CheckpointError unless all files of a kind are there, as long as they were."""
    wanted = list(names)
    try:
        if not wanted:
            raise PartError(f"{directory} has no file of its {kind}")
        for name in wanted:
            if name not in files:
                raise PartError(f"{directory / name} is missing, and not in its list")
            parts.check_size(directory, name, files[name])
    except PartError as error:
        raise CheckpointError(f"{error}{_HINT[kind]}") from None


def _read_rng(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as opened:
            tensors, rest = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} holds no generators: {error}{_HINT['rng']}") from None
    if lacking := rng.lacking(tensors, rest or {}):
        raise CheckpointError(f"{path} has no state of {', '.join(lacking)}{_HINT['rng']}")
    return tensors, rest or {}


def _all_can(prepare: Callable[[], dict[str, list[str]]]) -> dict[str, set[str]]:
    """What `prepare` gave on all ranks together; all raise CheckpointError when it raised on one of them."""
    given: dict[str, list[str]] = {}
    failed = None
    try:
        given = prepare()
    except (CheckpointError, PartError) as error:
        failed = str(error)
    told = exchange.gather([given, failed])
    if failures := [(rank, text) for rank, (_, text) in enumerate(told) if text]:
        raise CheckpointError(f"rank {failures[0][0]}: {failures[0][1]}")
    return {kind: {key for theirs, _ in told for key in theirs[kind]} for kind in given}

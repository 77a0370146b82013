"""The run directory, and the two places of a run outside it: sockets in a short path, weights in shared memory.

Layout (relax never writes outside these three):

    <run_dir>/   config.yaml topology.yaml runtime.json ledger.sqlite metrics.jsonl status.json
                 (config, topology, ledger and export.before-<lineage> are those of the lives before a resume,
                 topology.<node>.yaml the file that the launcher of a node was given)
                 logs/<service>.jsonl logs/<service>.out samples/ weights/ checkpoints/ export/
    runtime_dir  /tmp/relax-<run_id> or in $XDG_RUNTIME_DIR, mode 0700: ipc sockets (a socket path holds 107 bytes)
    shm_dir      /dev/shm/relax-<run_id>, mode 0700: tensors

Whoever takes part in a run on this host holds a shared lock on runtime_dir. A lock dies with its process, so the last
one out can tell that it is the last, and a newcomer can tell a live run from the remains of a dead one.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import yaml

from relax.config.options import PER_SERVICE
from relax.config.violation import ConfigError, Violation
from relax.launch.obstacle import obstacle
from relax.launch.places import enter, members, places_of, remove_if_dead, try_lock
from relax.names import file_name
from relax.status.snapshot import Snapshot, SnapshotError

# Tells which run a directory is of; it is written last.
RECORD = "runtime.json"
PIDS_SHOWN = 3
# A controller on another host that wrote its status so lately is alive: longer than file systems of several hosts take
# to show what was written.
ELSEWHERE_SECONDS = 30.0
# In the runtime directory: a link to the run directory, for services that know the run by its controller alone.
HOME = "run"


class Life(Protocol):
    """A lineage of a run, as its controller tells of it."""

    @property
    def run_id(self) -> str: ...

    @property
    def lineage(self) -> int: ...

    @property
    def cut(self) -> int: ...


class RunDir:
    """One run as seen from this host. Make it with `create`, `resume`, `create_or_join` or `load`, never directly.

    All but the last take part in the run: they hold the lock until `leave` (or death). `load` only looks.

    A run keeps its id through all resumes, for its checkpoints, ledger and manifests are of one run; each is a
    `lineage` of its own, which begins at batch `cut`. Whatever is left of the one before (a process beyond a broken
    network, a message under way, a lease, weights) is of another lineage and refused by everybody.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        runtime_dir: Path,
        shm_dir: Path,
        member: int | None = None,
        *,
        lineage: int = 0,
        cut: int = 0,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.runtime_dir = runtime_dir
        self.shm_dir = shm_dir
        self.lineage = lineage
        self.cut = cut
        self._member = member

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def topology(self) -> Path:
        return self.path / "topology.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:
        """What the controller alone knows, about once a second."""
        return self.path / "status.json"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def samples_dir(self) -> Path:
        return self.path / "samples"

    @property
    def weights_dir(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that this lineage begins from; None where it begins at the beginning."""
        return self.checkpoints_dir / str(self.cut) if self.cut else None

    @property
    def export_dir(self) -> Path:
        return self.path / "export"

    def set_aside_export(self) -> None:
        """Keeps the model that an earlier life wrote at an earlier end as export.before-<lineage>. Raises OSError."""
        if self.export_dir.exists():
            self.export_dir.rename(self.export_dir.with_name(f"{self.export_dir.name}.before-{self.lineage}"))

    def log(self, service: str) -> Path:
        """Structured log of a service."""
        return self.logs_dir / file_name(f"{service}.jsonl", "the log")

    def out(self, service: str) -> Path:
        """stdout and stderr of a service."""
        return self.logs_dir / file_name(f"{service}.out", "the output")

    def endpoint(self, service: str) -> str:
        """The ipc endpoint where a service binds: `ipc://<runtime_dir>/rollout-0.sock`."""
        return f"ipc://{self.runtime_dir / file_name(service, 'the service')}.sock"

    def sign_of_life(self, service: str) -> Path:
        """A file on this host that a service touches while its loop runs."""
        return self.runtime_dir / file_name(f"{service}.life", "the sign of life")

    @classmethod
    def create(
        cls,
        path: Path | None,
        *,
        name: str = "relax",
        directory: Path = Path("runs"),
        config: str = "",
        topology: str = "",
    ) -> "RunDir":
        """Opens a new run in `path`, or in the first free `<directory>/<name>-<n>`, and takes part in it.

        `config` and `topology` are the texts of config.yaml and topology.yaml. Raises ConfigError when `path` holds
        a run already, dead or alive, or cannot be made.
        """
        path = numbered(directory, name) if path is None else path.absolute()
        with _creating(path):
            if _live(path):
                raise ConfigError([_refusal(path, _goes_on(path))])
            return cls._open(path, config, topology)

    @classmethod
    def resume(
        cls, path: Path, cut: int, *, after: int | None = None, config: str = "", topology: str = ""
    ) -> "RunDir":
        """Goes on with the run at `path` from its checkpoint at batch `cut` (0: from the beginning) as a new lineage,
        and takes part in it. `after` is the lineage in which that checkpoint was looked up: of several who resume it at
        once, one does.

        `config` and `topology` take the place of those of the life before, which are kept as
        config.before-<lineage>.yaml and topology.before-<lineage>.yaml. Raises ConfigError when there is no run, it is
        alive, was resumed by somebody else, or it cannot be written.
        """
        path = path.absolute()
        cls.load(path, "--resume")
        with _creating(path, make=False):
            if _live(path):
                raise ConfigError([_refusal(path, _goes_on(path), "--resume", "Stop it first.")])
            run = cls.load(path, "--resume")
            if after is not None and run.lineage != after:
                problem = f"somebody else has resumed it meanwhile, as lineage {run.lineage}"
                raise ConfigError([_refusal(path, problem, "--resume", "Try again.")])
            with _refusing(path, "--resume", "Make the directory writable."):
                run.lineage, run.cut = run.lineage + 1, cut
                run.runtime_dir, run.shm_dir = places_of(run.run_id)  # the old ones may be gone with a login
                run._member = enter(run.runtime_dir, run.shm_dir)
                try:
                    for file, text in ((run.config, config), (run.topology, topology)):
                        if file.exists():
                            _write_whole(file.with_stem(f"{file.stem}.before-{run.lineage}"), file.read_text())
                        _write_whole(file, text)
                    run._write_places()
                except OSError:
                    os.close(run._member)
                    remove_if_dead(run.runtime_dir, run.shm_dir)
                    raise
        return run

    @classmethod
    def create_or_join(cls, path: Path, *, config: str = "", topology: str = "", deadline: float = 10.0) -> "RunDir":
        """Takes part in the run at `path`; opens it if nobody has: exactly one of any number of callers does.

        For services started one by one in any order. Raises ConfigError when `path` holds a run that has ended, or a
        live one with other options (every difference named), and TimeoutError after `deadline` seconds.
        """
        path = path.absolute()
        with _creating(path, deadline):
            if not _live(path):
                return cls._open(path, config, topology)
            run = cls.load(path)
            differences = list(_differences(run.config, config))
            if differences:
                raise ConfigError(differences)
            run._member = enter(run.runtime_dir, run.shm_dir)
            return run

    @classmethod
    def join(
        cls, path: Path | None, life: Life, *, name: str, directory: Path, config: str = "", topology: str = ""
    ) -> "RunDir":
        """Takes part in a run whose own directory is with its controller, perhaps on another host: in the `life` that
        the controller tells of.

        Logs and samples of this host's services go to `path`; by default to the run's directory on this host if it has
        one, else to `<directory>/<name>-<run_id>`. A directory of an earlier life goes on with this one. Raises
        ConfigError when `path` holds another run, or another life is going on there.
        """
        run_id = life.run_id
        path = (path or _home(run_id) or directory / f"{name}-{run_id}").absolute()
        with _creating(path):
            if not (path / RECORD).is_file():
                return cls._open(path, config, topology, life)
            run = cls.load(path)
            if run.run_id != run_id:
                raise ConfigError([_refusal(path, f"it holds run {run.run_id}, the controller's is {run_id}")])
            anew = (run.lineage, run.cut) != (life.lineage, life.cut)
            if run.lineage > life.lineage or (anew and _live(path)):
                problem = f"lineage {run.lineage} of the run is there, the controller's is {life.lineage}"
                raise ConfigError([_refusal(path, problem, fix="End what is left of the other one.")])
            if anew:
                run.runtime_dir, run.shm_dir = places_of(run_id)  # as for a resume
            run._member = enter(run.runtime_dir, run.shm_dir)
            if anew:
                run.lineage, run.cut = life.lineage, life.cut
                run._write(config, topology)
            return run

    @classmethod
    def load(cls, path: Path, option: str = "--run-dir") -> "RunDir":
        """Looks at a run without taking part. Raises ConfigError when there is none at `path`, which `option` named, or
        a damaged one."""
        record = path / RECORD
        if not record.is_file():
            problem = f"is no run directory: it has no {RECORD}"
            raise ConfigError([_refusal(path, problem, option, "Name one that has.")])
        try:
            facts = json.loads(record.read_bytes())
            run_id, runtime_dir, shm_dir = (str(facts[name]) for name in ("run_id", "runtime_dir", "shm_dir"))
            lineage, cut = int(facts.get("lineage", 0)), int(facts.get("cut", 0))
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"is a damaged run directory: {RECORD} cannot be read ({type(error).__name__}: {error})"
            raise ConfigError([_refusal(path, problem, option, "Name another one.")]) from None
        return cls(path.absolute(), run_id, Path(runtime_dir), Path(shm_dir), lineage=lineage, cut=cut)

    def topology_of(self, node: str | None) -> Path:
        """The topology as the launcher of `node` was given it: nodes may be added to a run under way, and then theirs
        says more than the one that the run was opened with."""
        return self.topology if node is None else self.path / file_name(f"topology.{node}.yaml", "the topology")

    def keep_topology(self, node: str | None, text: str) -> None:
        _write_whole(self.topology_of(node), text)

    def goes_on(self) -> bool:
        """Whether somebody on this host still takes part; the remains of a run that is over are cleared away."""
        return _live(self.path)

    def leave(self, deadline: float = 2.0) -> bool:
        """Ends this process's part in the run; the last one on the host removes sockets and shared memory.

        True when that was this process. Calling it again does nothing.
        """
        if self._member is None:
            return False
        os.close(self._member)
        self._member = None
        # Without the creator's lock (a directory taken away, a creator that is stuck) the removal is left to the sweep.
        with contextlib.suppress(TimeoutError, FileNotFoundError), _creating(self.path, deadline, make=False):
            return remove_if_dead(self.runtime_dir, self.shm_dir)
        return False

    @classmethod
    def _open(cls, path: Path, config: str, topology: str, life: Life | None = None) -> "RunDir":
        if refused := refusals(path):
            raise ConfigError(refused)
        run_id, lineage, cut = (life.run_id, life.lineage, life.cut) if life else (secrets.token_hex(6), 0, 0)
        runtime_dir, shm_dir = places_of(run_id)
        with _refusing(path):
            run = cls(path, run_id, runtime_dir, shm_dir, enter(runtime_dir, shm_dir), lineage=lineage, cut=cut)
            try:
                run._write(config, topology)
            except OSError:
                assert run._member is not None
                os.close(run._member)
                remove_if_dead(runtime_dir, shm_dir)
                raise
        return run

    def _write(self, config: str, topology: str) -> None:
        self.config.write_text(config)
        self.topology.write_text(topology)
        self._write_places()

    def _write_places(self) -> None:
        with contextlib.suppress(FileExistsError):
            (self.runtime_dir / HOME).symlink_to(self.path)
        for folder in (self.logs_dir, self.samples_dir, self.weights_dir):
            folder.mkdir(exist_ok=True)
        facts = {
            "run_id": self.run_id,
            "lineage": self.lineage,
            "cut": self.cut,
            "runtime_dir": str(self.runtime_dir),
            "shm_dir": str(self.shm_dir),
            "host": socket.gethostname(),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        # Renamed into place last: a reader that finds it finds everything else.
        _write_whole(self.path / RECORD, json.dumps(facts, indent=2) + "\n")


def _write_whole(path: Path, text: str) -> None:
    """`path` holds `text`, or is as it was before."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.rename(path)


def _home(run_id: str) -> Path | None:
    """The directory of a run that has one on this host."""
    home = places_of(run_id)[0] / HOME
    return home.resolve() if home.is_dir() else None


def refusals(path: Path, *, joins: bool = False) -> list[Violation]:
    """Why no run can be opened in `path`, or joined there; leaves nothing there."""
    if problem := obstacle(path):
        return [_refusal(path, problem)]
    if joins:  # which run it may hold is known when the controller has told of its own
        return []
    for remains in ("ledger.sqlite", "metrics.jsonl"):
        if (path / remains).exists():
            return [_refusal(path, f"it holds the {remains} of an earlier run")]
    return []


def resume_refusals(run: RunDir) -> list[Violation]:
    """Why `run` cannot be resumed where it is; leaves nothing there."""
    if members(run.runtime_dir):
        return [_refusal(run.path, _goes_on(run.path), "--resume", "Stop it first.")]
    if problem := _goes_on_elsewhere(run):
        fix = f"Stop it there; if it was killed, wait {ELSEWHERE_SECONDS:g} s."
        return [_refusal(run.path, problem, "--resume", fix)]
    problems = {place: obstacle(place) for place in (run.path, run.checkpoints_dir)}
    fix = "Make it writable, or copy the run to a place that is."
    return [_refusal(place, problem, "--resume", fix) for place, problem in problems.items() if problem][:1]


def _goes_on_elsewhere(run: RunDir) -> str | None:
    """What speaks for a living controller on another host that has this directory too, whose processes and locks cannot
    be seen from here."""
    try:
        seen = Snapshot.read(run.status)
    except SnapshotError:
        return None
    if seen is None or seen.code is not None or seen.host == socket.gethostname():
        return None
    silence = time.time() - seen.time
    if silence > ELSEWHERE_SECONDS:
        return None
    return f"a run is going on there, on host {seen.host}: its controller wrote {run.status.name} {silence:.0f} s ago"


def directory_refusals(directory: Path, source: str = "") -> list[Violation]:
    """Why no run can be numbered in `directory`, the topology file's run.directory; leaves nothing there."""
    problem = obstacle(directory)
    return [Violation("run.directory", str(directory), problem, _DIRECTORY_FIX, source)] if problem else []


_DIRECTORY_FIX = "Name a directory that can be written to as run.directory, or give --run-dir."


def numbered(directory: Path, name: str) -> Path:
    """Makes and returns `<directory>/<name>-<n>`, n one above the highest there is; safe against other launchers.

    Raises ConfigError when `directory` cannot be made or written to.
    """
    if refused := directory_refusals(directory):
        raise ConfigError(refused)
    directory = directory.absolute()
    with _refusing(directory, "run.directory", _DIRECTORY_FIX):
        return _numbered(directory, name)


def _numbered(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    taken = (re.fullmatch(re.escape(name) + r"-(\d+)", entry.name) for entry in directory.iterdir())
    n = 1 + max((int(match[1]) for match in taken if match), default=0)
    while True:
        try:
            (directory / f"{name}-{n}").mkdir()
        except FileExistsError:
            n += 1
        else:
            return directory / f"{name}-{n}"


@contextlib.contextmanager
def _creating(path: Path, deadline: float = 10.0, *, make: bool = True) -> Iterator[None]:
    """Holds the directory's own lock, under which runs are opened, joined and cleared away."""
    if make and (problem := obstacle(path)):
        raise ConfigError([_refusal(path, problem)])
    with _refusing(path) if make else contextlib.nullcontext():
        if make:
            path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + deadline
        while not try_lock(fd):
            if time.monotonic() > end:
                raise TimeoutError(f"{path}: another process has been opening this run for {deadline:g} s")
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _refusing(path: Path, option: str = "--run-dir", fix: str = "") -> Iterator[None]:
    """Whatever the file system says against a new run, as a refusal of `path`."""
    try:
        yield
    except OSError as error:
        about = f": {error.filename}" if error.filename and error.filename != str(path) else ""
        problem = f"the run cannot be opened there: {error.strerror or error}{about}"
        raise ConfigError([_refusal(path, problem, option, fix)]) from None


def _live(path: Path) -> bool:
    """Whether somebody takes part in a run at `path`; the remains of a dead one are cleared away."""
    if not (path / RECORD).is_file():
        return False
    run = RunDir.load(path)
    return run.runtime_dir.is_dir() and not remove_if_dead(run.runtime_dir, run.shm_dir)


def _goes_on(path: Path) -> str:
    pids = members(RunDir.load(path).runtime_dir)
    shown = ", ".join(str(pid) for pid in pids[:PIDS_SHOWN] if pid) or "of another container"
    more = f" and {len(pids) - PIDS_SHOWN} more" if len(pids) > PIDS_SHOWN else ""
    return f"a run is going on there (pid {shown}{more})"


def _refusal(path: Path, problem: str, option: str = "--run-dir", fix: str = "") -> Violation:
    return Violation(option, str(path), problem, fix or "Choose a new directory, or leave --run-dir out.")


def _differences(config: Path, text: str) -> Iterator[Violation]:
    theirs, ours = (yaml.safe_load(one) or {} for one in (config.read_text(), text))
    for name in sorted((theirs.keys() | ours.keys()) - PER_SERVICE):
        if theirs.get(name) != ours.get(name):
            yield Violation(
                "--" + name.replace("_", "-"),
                ours.get(name),
                f"the run was opened with {theirs.get(name)!r} ({config})",
                "Start every service of a run with the same options.",
            )

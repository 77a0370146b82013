"""Run directories: one creator, joiners, and nothing left in /tmp or /dev/shm."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.config.violation import ConfigError
from relax.launch import places, rundir
from relax.launch.obstacle import obstacle
from relax.launch.places import places_of
from relax.launch.plan import mark_of
from relax.launch.rundir import RunDir, directory_refusals, numbered, refusals, resume_refusals
from relax.protocol.messages import Welcome
from relax.status.snapshot import Seen, Snapshot

JOIN = """
import pathlib, sys, time
from relax.launch.rundir import RunDir
from relax.protocol.messages import Welcome
run = RunDir.create_or_join(pathlib.Path(sys.argv[1]))
print(run.run_id, flush=True)
time.sleep(60)
"""


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
    if started:
        RunDir.create_or_join(tmp_path / "run").leave()


def join_in_process(path: Path, members: list[subprocess.Popen[str]]) -> str:
    process = subprocess.Popen([sys.executable, "-c", JOIN, str(path)], stdout=subprocess.PIPE, text=True)
    members.append(process)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_new_run_has_its_files_and_private_places(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config="seed: 1\n", topology="services: {}\n")
    assert run.config.read_text() == "seed: 1\n" and run.topology.read_text() == "services: {}\n"
    for place in (run.runtime_dir, run.shm_dir):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert run.shm_dir == Path(f"/dev/shm/relax-{run.run_id}")
    assert len(run.endpoint("advantages-with-a-long-name")) < 107
    facts = json.loads((tmp_path / "run" / "runtime.json").read_text())
    assert facts["run_id"] == run.run_id and facts["runtime_dir"] == str(run.runtime_dir)
    assert run.leave() and not run.runtime_dir.exists() and not run.shm_dir.exists()


def test_numbers_count_up_past_the_highest(tmp_path: Path) -> None:
    for name in ("demo-2", "demo-10", "demo-x", "other-99"):
        (tmp_path / name).mkdir()
    assert numbered(tmp_path, "demo").name == "demo-11"
    assert numbered(tmp_path, "demo").name == "demo-12"


def test_of_many_processes_exactly_one_creates(tmp_path: Path, members: list[subprocess.Popen[str]]) -> None:
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda: ids.append(join_in_process(tmp_path / "run", members))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 5 and len(set(ids)) == 1 and ids[0]


def test_the_last_to_leave_removes_the_places(tmp_path: Path) -> None:
    first = RunDir.create_or_join(tmp_path / "run")
    second = RunDir.create_or_join(tmp_path / "run")
    assert first.run_id == second.run_id
    assert not first.leave() and first.runtime_dir.is_dir() and first.shm_dir.is_dir()
    assert second.leave() and not first.runtime_dir.exists() and not first.shm_dir.exists()
    assert not second.leave()


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.ledger.touch()
    run.leave()
    for enter in (RunDir.create, RunDir.create_or_join):
        with pytest.raises(ConfigError, match=r"ledger\.sqlite of an earlier run"):
            enter(tmp_path / "run")


def test_a_live_run_is_joined_but_not_created_again(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.ledger.touch()
    with pytest.raises(ConfigError, match="a run is going on there"):
        RunDir.create(tmp_path / "run")
    other = RunDir.create_or_join(tmp_path / "run")
    assert other.run_id == run.run_id
    run.leave()
    other.leave()


def test_remains_of_killed_members_are_cleared_and_the_directory_serves_again(
    tmp_path: Path, members: list[subprocess.Popen[str]]
) -> None:
    dead_id = join_in_process(tmp_path / "run", members)
    dead = RunDir.load(tmp_path / "run")
    assert dead.run_id == dead_id and dead.shm_dir.is_dir()
    os.kill(members[0].pid, signal.SIGKILL)
    members[0].wait()
    run = RunDir.create_or_join(tmp_path / "run")
    assert run.run_id != dead_id and not dead.shm_dir.exists() and not dead.runtime_dir.exists()
    run.leave()


def test_joining_with_other_options_names_each_difference(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config="seed: 1\nlr: 0.1\nlog_level: info\n")
    with pytest.raises(ConfigError) as refused:
        RunDir.create_or_join(tmp_path / "run", config="seed: 2\nlr: 0.1\nlog_level: debug\n")
    (violation,) = refused.value.violations
    assert violation.option == "--seed" and violation.value == 2 and "opened with 1" in violation.problem
    run.leave()


def test_a_directory_without_a_run_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        RunDir.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": "r"}', "\xff"])
def test_a_damaged_run_directory_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "runtime.json").write_bytes(text.encode("latin-1"))
    for enter in (RunDir.load, RunDir.create, RunDir.create_or_join):
        with pytest.raises(ConfigError, match=r"damaged run directory: runtime\.json cannot be read"):
            enter(tmp_path)


def no_place(folder: Path) -> list[tuple[Path, str]]:
    """Directories that cannot be made, and what is said of them."""
    (folder / "file").touch()
    return [
        (Path("/proc/nope/run"), "cannot be made or written to"),
        (folder / "file", "is no directory"),
        (folder / "file" / "run", f"cannot be made: {folder / 'file'} is no directory"),
        (folder / "new" / ("x" * 300), "cannot be made"),
        (folder / ("x" * 300), "cannot be made"),
        (folder / "nul\0", "holds a NUL character"),
    ]


def test_a_directory_that_cannot_be_made_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for path, told in no_place(tmp_path):
        for opened in (RunDir.create, RunDir.create_or_join):
            (violation,) = refusals(path)
            assert violation.option == "--run-dir" and told in violation.problem and violation.fix
            with pytest.raises(ConfigError, match="--run-dir"):
                opened(path)
        (violation,) = directory_refusals(path, "t.yaml")
        assert told in violation.problem and violation.option == "run.directory" and violation.source == "t.yaml"
        with pytest.raises(ConfigError, match=r"run\.directory"):
            numbered(path, "t")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


UNWRITABLE = """
import os, pathlib, sys
from relax.launch.rundir import refusals
from relax.protocol.messages import Welcome
os.chmod(sys.argv[1], 0o500)
os.setuid(65534)  # permissions do not hold root
print(*refusals(pathlib.Path(sys.argv[1]) / "run"))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_parent_that_another_user_holds_is_refused(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run([sys.executable, "-c", UNWRITABLE, folder], capture_output=True, text=True, check=True)
    assert "cannot be made or written to: Permission denied" in told.stdout, told


def test_a_directory_that_can_be_made_is_only_tried(tmp_path: Path) -> None:
    assert obstacle(tmp_path / "a" / "b") is None and obstacle(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_written_is_refused_and_leaves_no_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir.secrets, "token_hex", lambda size: "feedfacefeed")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be opened there: Is a directory: .*config\.yaml"):
        RunDir.create(tmp_path / "run")
    assert not any(place.exists() for place in places_of("feedfacefeed"))


def test_a_resumed_run_keeps_its_id_and_is_a_lineage_of_its_own(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "run", config="seed: 1\n", topology="a: 1\n")
    assert (first.lineage, first.cut, first.checkpoint) == (0, 0, None)
    first.leave()
    for lineage, cut in ((1, 0), (2, 40)):
        run = RunDir.resume(tmp_path / "run", cut, config=f"lr: {lineage}\n", topology=f"a: {lineage + 1}\n")
        assert (run.run_id, run.lineage, run.cut) == (first.run_id, lineage, cut)
        assert run.runtime_dir.is_dir() and run.shm_dir.is_dir()
        assert mark_of(run, None) != mark_of(first, None), "what clears up after the first does not end this one"
        joined = RunDir.create_or_join(tmp_path / "run", config=f"lr: {lineage}\n")
        assert (joined.lineage, joined.cut) == (lineage, cut)
        joined.leave()
        run.leave()
    assert run.checkpoint == tmp_path / "run" / "checkpoints" / "40"
    assert (tmp_path / "run" / "config.before-1.yaml").read_text() == "seed: 1\n"
    assert (tmp_path / "run" / "topology.before-2.yaml").read_text() == "a: 2\n"
    assert run.config.read_text() == "lr: 2\n" and run.topology.read_text() == "a: 3\n"


def test_the_model_of_an_earlier_end_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").leave()
    run = RunDir.resume(tmp_path / "run", 3)
    run.set_aside_export()
    run.export_dir.mkdir()
    (run.export_dir / "model.safetensors").touch()
    run.set_aside_export()
    assert not run.export_dir.exists() and (run.path / "export.before-1" / "model.safetensors").is_file()
    run.leave()


def test_a_run_that_is_alive_is_not_resumed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"--resume.*a run is going on there \(pid {os.getpid()}\)"):
        RunDir.resume(tmp_path / "run", 0)
    joined = [RunDir.create_or_join(tmp_path / "run") for _ in range(2)]
    assert places.members(run.runtime_dir) == [os.getpid()]
    for one in joined:
        one.leave()
    assert RunDir.load(tmp_path / "run").lineage == 0
    run.leave()


def test_of_several_who_resume_a_run_at_once_one_does(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").leave()
    ends: list[str] = []

    def resume() -> None:
        try:
            run = RunDir.resume(tmp_path / "run", 0, after=0)
        except ConfigError as refused:
            ends.append(str(refused))
        else:
            ends.append("resumed")
            run.leave()  # whoever comes now finds it dead, and in another life than it looked at

    threads = [threading.Thread(target=resume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends.count("resumed") == 1 and RunDir.load(tmp_path / "run").lineage == 1
    refused = [end for end in ends if end != "resumed"]
    assert all("going on there" in end or "resumed it meanwhile, as lineage 1" in end for end in refused), refused


def test_what_was_killed_is_resumed_and_its_remains_are_cleared(
    tmp_path: Path, members: list[subprocess.Popen[str]]
) -> None:
    run_id = join_in_process(tmp_path / "run", members)
    dead = RunDir.load(tmp_path / "run")
    (dead.shm_dir / "weights").touch()
    os.kill(members[0].pid, signal.SIGKILL)
    members[0].wait()
    run = RunDir.resume(tmp_path / "run", 3)
    assert (run.run_id, run.lineage) == (run_id, 1) and not list(run.shm_dir.iterdir())
    run.leave()


@pytest.mark.parametrize(
    ("host", "silent", "code", "refused"),
    [
        ("elsewhere", 2.0, None, True),
        ("elsewhere", 100.0, None, False),  # killed, or its host is gone
        ("elsewhere", 2.0, 1, False),  # it said itself that it had ended
        (socket.gethostname(), 2.0, None, False),  # killed here, where nobody takes part any more
    ],
)
def test_a_run_that_is_alive_on_another_host_is_not_resumed(
    tmp_path: Path, host: str, silent: float, code: int | None, refused: bool
) -> None:
    """Both hosts have the directory; neither sees the processes and the locks of the other."""
    run = RunDir.create(tmp_path / "run")
    run.leave()
    heard = time.time() - silent
    me = Seen("controller", "controller", "", 1, "1a2b", True, heard, heard, "at work", None)
    Snapshot(run.run_id, 0, host, heard, heard, code, 40, 3, 3, 4, "nothing", (), 0, 0, 8, 8, services=(me,)).write(
        run.status
    )
    problems = [str(violation) for violation in resume_refusals(run)]
    assert bool(problems) == refused
    assert all(
        "a run is going on there, on host elsewhere: its controller wrote status.json 2 s ago" in p for p in problems
    )


@pytest.mark.parametrize("how", ["resume", "join"])
def test_a_run_goes_on_when_the_login_that_it_began_in_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The system removes $XDG_RUNTIME_DIR with the last session of its user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as login:
        monkeypatch.setenv("XDG_RUNTIME_DIR", login)
        run = RunDir.create(tmp_path / "run")
        assert run.runtime_dir.parent == Path(login)
        run.leave()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    if how == "resume":
        again = RunDir.resume(tmp_path / "run", 3)
    else:
        again = RunDir.join(tmp_path / "run", Welcome(run.run_id, 1, 3), name="t", directory=tmp_path)
    assert again.runtime_dir.parent == Path("/tmp") and again.runtime_dir.is_dir()
    beside = RunDir.create_or_join(tmp_path / "run")
    assert beside.runtime_dir == again.runtime_dir
    beside.leave()
    again.leave()


@pytest.mark.parametrize("made", [False, True])
def test_where_no_run_was_there_is_nothing_to_resume(tmp_path: Path, made: bool) -> None:
    path = tmp_path / "run"
    if made:
        path.mkdir()
    with pytest.raises(ConfigError, match="is no run directory"):
        RunDir.resume(path, 0)


def test_a_resume_that_cannot_be_written_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunDir.create(tmp_path / "run", config="seed: 1\n")
    first.leave()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "_write_whole", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        RunDir.resume(tmp_path / "run", 3)
    monkeypatch.undo()
    assert RunDir.load(tmp_path / "run").lineage == 0 and first.config.read_text() == "seed: 1\n"
    assert not first.runtime_dir.exists() and not first.shm_dir.exists()


def test_a_host_goes_on_in_the_life_that_the_controller_tells_of(tmp_path: Path) -> None:
    def join(lineage: int, cut: int) -> RunDir:
        return RunDir.join(tmp_path / "run", Welcome("a1b2", lineage, cut), name="t", directory=tmp_path)

    run = join(1, 5)
    assert (run.lineage, run.cut, run.checkpoint) == (1, 5, tmp_path / "run" / "checkpoints" / "5")
    beside = join(1, 5)
    with pytest.raises(ConfigError, match="lineage 1 of the run is there, the controller's is 2"):
        join(2, 7)
    beside.leave()
    run.leave()
    run = join(2, 7)
    assert (run.lineage, run.cut) == (2, 7) and RunDir.load(tmp_path / "run").lineage == 2
    run.leave()
    with pytest.raises(ConfigError, match="lineage 2 of the run is there, the controller's is 1"):
        join(1, 5)

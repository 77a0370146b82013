"""Checkpoints of a run: complete or not there, whatever happens while they are written."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from relax.checkpoints import Checkpoint, CheckpointDirectory, CheckpointError, NoRoomError, Writing

PARTS = ("ledger", "actor")


def fill(writing: Writing, content: str = "x" * 100) -> None:
    for name in PARTS:
        part = writing.part(name)
        part.mkdir()
        (part / "data").write_text(f"{name} {writing.batch} {content}")
        (part / "more").write_bytes(b"\0" * 10)
        writing.close_part(name)


def make(directory: CheckpointDirectory, batch: int, lineage: int = 0) -> Checkpoint:
    writing = directory.begin(batch)
    fill(writing)
    return directory.complete(writing, parts=PARTS, run_id="r", lineage=lineage, options="abc")


def names(directory: CheckpointDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir())


def test_a_complete_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    assert directory.newest() is None
    made = make(directory, 4, lineage=2)
    found = CheckpointDirectory(directory.path).newest()
    assert found == made
    assert (made.batch, made.lineage, made.run_id, made.options) == (4, 2, "r", "abc")
    assert made.part("actor").joinpath("data").read_text().startswith("actor 4")
    assert made.size == sum(p.stat().st_size for p in made.path.rglob("*") if p.is_file() and p.suffix != ".json")
    with pytest.raises(CheckpointError, match="has no part 'critic'; it has actor, ledger"):
        made.part("critic")


def test_newest_is_by_number_not_by_name(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=5)
    for batch in (9, 10, 100):
        make(directory, batch)
        newest = directory.newest()
        assert newest is not None and newest.batch == batch


def cut_a_byte(path: Path) -> None:
    (path / "actor" / "data").write_bytes((path / "actor" / "data").read_bytes()[:-1])


def flip_a_byte(path: Path) -> None:
    file = path / "ledger" / "more"
    file.write_bytes(b"\1" + file.read_bytes()[1:])


def lose_a_file(path: Path) -> None:
    (path / "actor" / "more").unlink()


def lose_the_listing(path: Path) -> None:
    (path / "actor" / "parts.json").unlink()


def list_another_file(path: Path) -> None:
    (path / "actor" / "data").write_text("other")
    (path / "actor" / "parts.json").unlink()
    Writing(0, path).close_part("actor")


def lose_the_marker(path: Path) -> None:
    (path / "complete.json").unlink()


def cut_the_marker(path: Path) -> None:
    (path / "complete.json").write_text((path / "complete.json").read_text()[:-10])


def rise_in_schema(path: Path) -> None:
    facts = json.loads((path / "complete.json").read_text())
    (path / "complete.json").write_text(json.dumps(facts | {"schema": 9}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_a_byte, r"data has \d+ bytes, \d+ were written"),
        (flip_a_byte, "more is damaged: digest"),
        (lose_a_file, "more is missing"),
        (lose_the_listing, r"parts\.json is missing"),
        (list_another_file, "lists other files than the marker says"),
        (lose_the_marker, r"no complete\.json"),
        (cut_the_marker, "is no marker"),
        (rise_in_schema, "has schema 9, this Relax reads 1"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    directory = CheckpointDirectory(tmp_path)
    make(directory, 9)
    damage(make(directory, 10).path)
    with capture_logs() as logs:
        newest = directory.newest()
    assert newest is not None and newest.batch == 9
    (entry,) = logs
    assert entry["event"] == "checkpoint_skipped" and entry["checkpoint"].endswith("/10")
    assert re.search(told, entry["problem"])


def test_a_part_that_is_not_closed_does_not_count(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    make(directory, 1)
    writing = directory.begin(2)
    fill(writing)
    (writing.part("actor") / "late").write_text("x")
    with pytest.raises(CheckpointError, match="late is not listed"):
        directory.complete(writing, parts=PARTS, run_id="r", lineage=0)
    (writing.part("actor") / "late").unlink()
    with pytest.raises(CheckpointError, match=r"critic/parts\.json is missing"):
        directory.complete(writing, parts=(*PARTS, "critic"), run_id="r", lineage=0)
    newest = directory.newest()
    assert newest is not None and newest.batch == 1
    assert directory.complete(writing, parts=PARTS, run_id="r", lineage=0).batch == 2, "what was missing is there now"


def test_a_listing_that_leads_out_of_its_part_is_refused(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    writing = directory.begin(2)
    fill(writing)
    (writing.part("actor") / "parts.json").write_text('{"../ledger/data": [1, ""]}')
    with pytest.raises(CheckpointError, match=r"'\.\./ledger/data' is no name of a file in its"):
        directory.complete(writing, parts=PARTS, run_id="r", lineage=0)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for batch in (9, 10, 11, 100):
        make(directory, batch)
    assert names(directory) == ["100", "11"]


def test_what_an_earlier_lineage_left_damaged_does_not_push_out_the_good_one(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    make(directory, 15)
    shutil.copytree(tmp_path / "15", tmp_path / "20")
    make(directory, 18, lineage=1)
    assert names(directory) == ["18"]


def test_leftovers_of_a_crash_are_removed_at_the_next_begin(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    make(directory, 1)
    fill(directory.begin(2))
    (tmp_path / "0.discarded-ab").mkdir()
    (tmp_path / "notes").mkdir()
    writing = directory.begin(3)
    assert names(directory) == ["1", writing.path.name, "notes"]
    directory.abandon(writing)
    assert names(directory) == ["1", "notes"]


def test_an_unmarked_directory_gives_way_and_a_complete_one_does_not(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    lose_the_marker(make(directory, 3).path)
    make(directory, 3, lineage=1)
    with pytest.raises(CheckpointError, match="3 is a complete checkpoint of this cut already"):
        directory.begin(3)


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path)
    made = make(directory, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=made.size))
    with pytest.raises(NoRoomError, match=rf"checkpoint 2 needs about {int(made.size * 1.1)} bytes .* {made.size} are"):
        directory.begin(2)
    with pytest.raises(NoRoomError, match="needs about 1000000 bytes"):
        directory.begin(2, wanted=1_000_000)
    assert names(directory) == ["1"]
    directory.abandon(directory.begin(2, wanted=10))


def test_a_disk_that_fills_up_is_an_error_and_the_one_before_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    make(directory, 1)
    writing = directory.begin(2)
    fill(writing)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"checkpoint 2 cannot be written to .*: .*No space left on device"):
        directory.complete(writing, parts=PARTS, run_id="r", lineage=0)
    newest = directory.newest()
    assert newest is not None and newest.batch == 1


def test_files_are_on_the_disk_before_the_rename_and_the_marker_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    writing = directory.begin(2)
    fill(writing)
    done: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def synced(fd: int) -> None:
        done.append(("sync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        sync(fd)

    def renamed(path: Path, to: Path) -> Path:
        done.append(("rename", str(to)))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    inside = {str(path) for path in writing.path.rglob("*")} | {str(writing.path)}
    directory.complete(writing, parts=PARTS, run_id="r", lineage=0)
    at = done.index(("rename", str(tmp_path / "2")))
    assert inside == {path for kind, path in done[:at] if kind == "sync"}
    assert done[at + 1 :] == [
        ("sync", str(tmp_path)),
        ("sync", str(tmp_path / "2" / ".complete.json.partial")),
        ("rename", str(tmp_path / "2" / "complete.json")),
        ("sync", str(tmp_path / "2")),
    ]


FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def die_at(operation: int, root: Path, work: Callable[[], object]) -> bool:
    """Does `work` in a child that dies before its `operation`-th act on a file below `root`. Whether it died."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            # Removing a tree names its files relative to an open directory.
            if event in FILE_EVENTS and (event != "open" or str(arguments[0]).startswith(str(root))):
                count += 1
                if count > operation:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("keep", [1, 2])
def test_whenever_a_process_dies_the_newest_checkpoint_is_complete(
    tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # the machine lives on
    operation, died, newest = 0, True, []
    while died:
        path = tmp_path / str(operation)
        directory = CheckpointDirectory(path, keep=keep)
        for batch in (8, 9):
            make(directory, batch)
        fill(directory.begin(10))  # a crashed writing to be cleared
        died = die_at(operation, path, lambda directory=directory: make(directory, 10))  # type: ignore[misc]
        found = directory.newest()
        assert found is not None
        newest.append(found.batch)
        assert found.part("ledger").joinpath("data").read_text().startswith(f"ledger {found.batch}")
        assert make(directory, 11).batch == 11, "and the run goes on from there"
        assert [name for name in names(directory) if "-" in name] == []
        shutil.rmtree(path)
        operation += 1
    assert newest == sorted(newest) and set(newest) == {9, 10}
    assert operation > 60

"""Which run a resume goes on with, and from where."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from relax.checkpoints import CheckpointDirectory
from relax.config.options import Options
from relax.config.resolve import resolve
from relax.config.violation import ConfigError
from relax.launch.resume import find, newest_run
from relax.launch.rundir import RunDir

BASE: dict[str, Any] = {"prompt_data": "p", "hf_checkpoint": "m", "num_rollout": 60}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """One that has ended."""
    run = RunDir.create(tmp_path / "runs" / "relax-3", config=resolve(BASE, None).config_yaml())
    run.leave()
    return run


def save(run: RunDir, batch: int, run_id: str = "") -> Path:
    directory = CheckpointDirectory(run.checkpoints_dir)
    writing = directory.begin(batch)
    writing.part("actor").mkdir()
    (writing.part("actor") / "weights").write_text("1234")
    writing.close_part("actor")
    return directory.complete(writing, parts=["actor"], run_id=run_id or run.run_id, lineage=0).path


def test_a_run_goes_on_from_its_newest_complete_checkpoint(run: RunDir) -> None:
    assert find(run.path, Options(**BASE)).cut == 0
    assert "has no complete checkpoint: the run begins anew at batch 0" in str(find(run.path, Options(**BASE)))
    save(run, 9)
    path = save(run, 10)
    found = find(run.path, Options(**BASE))
    assert (found.cut, found.path) == (10, run.path) and f"goes on at batch 10, from {path}" in str(found)
    (path / "actor" / "weights").write_text("123")
    with capture_logs() as logs:
        assert find(run.path, Options(**BASE)).cut == 9
    assert "weights has 3 bytes, 4 were written" in logs[0]["problem"]
    resumed = RunDir.resume(found.path, 9)
    assert resumed.checkpoint == run.checkpoints_dir / "9"
    resumed.leave()


def test_options_that_differ_are_all_named_and_nothing_is_touched(run: RunDir) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as refused:
        find(run.path, Options(**BASE | {"lr": 1.0, "seed": 7}))
    assert [v.option for v in refused.value.violations] == ["--critic-lr", "--lr", "--seed"]
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_finished_run_is_refused_until_its_end_is_moved(run: RunDir) -> None:
    save(run, 60)
    assert find(run.path, Options(**BASE)).cut == 60, "its model is not exported"
    run.export_dir.mkdir()
    with pytest.raises(ConfigError, match="the run is finished: batch 59 is trained and saved"):
        find(run.path, Options(**BASE))
    assert find(run.path, Options(**BASE | {"num_rollout": 61})).cut == 60


def test_a_checkpoint_of_another_run_is_refused(run: RunDir) -> None:
    save(run, 9, run_id="feed")
    with pytest.raises(ConfigError, match="is a checkpoint of run feed, the directory is of"):
        find(run.path, Options(**BASE))


@pytest.mark.parametrize("text", [None, "", "[1, 2]", "{"])
def test_a_run_whose_options_are_lost_is_refused(run: RunDir, text: str | None) -> None:
    run.config.unlink() if text is None else run.config.write_text(text)
    with pytest.raises(ConfigError, match=r"--resume.*config\.yaml cannot be read"):
        find(run.path, Options(**BASE))


def test_the_newest_run_is_of_the_highest_number(tmp_path: Path, run: RunDir) -> None:
    runs = tmp_path / "runs"
    for name in ("relax-9", "relax-10", "other-99"):
        RunDir.create(runs / name).leave()
    (runs / "relax-100").mkdir()  # no run was opened there
    assert newest_run(runs, "relax") == runs / "relax-10"
    with pytest.raises(ConfigError, match=r"names no run, and .* holds none called nothing-<n>"):
        newest_run(runs, "nothing")
    with pytest.raises(ConfigError, match="names no run"):
        newest_run(tmp_path / "nowhere", "relax")

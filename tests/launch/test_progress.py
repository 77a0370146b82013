"""Progress is read from metrics.jsonl while it is written."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relax.launch import progress as module
from relax.launch.progress import PlainView, Progress, TableView, duration


def row(batch: int, **more: Any) -> str:
    facts = {"batch": batch, "rollout/raw_reward": 0.5, "train/loss": -0.25, "perf/tokens_per_s": 2048.4}
    return json.dumps(facts | {"rollout/response_len/mean": 12.34, "train/staleness/max": 2} | more) + "\n"


def test_time_left_follows_the_recent_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    file = tmp_path / "metrics.jsonl"
    progress = Progress(file, total=100)
    assert progress.left() is None
    for batch in range(40):
        clock[0] += 10.0 if batch < 15 else 2.0
        with file.open("a") as more:
            more.write(row(batch))
        progress.update()
    assert progress.left() == pytest.approx(60 * 2.0)
    assert Progress(file, total=None).left() is None


def test_a_resume_begins_the_rate_anew_and_its_rows_take_the_place_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    file = tmp_path / "metrics.jsonl"
    progress = Progress(file, total=100)

    def trains(batch: int, seconds: float, reward: float = 0.5) -> None:
        clock[0] += seconds
        with file.open("a") as more:
            more.write(row(batch, **{"rollout/raw_reward": reward}))
        progress.update()

    for batch in range(8):
        trains(batch, 1.0)
    trains(5, 500.0, reward=0.75)
    assert progress.done == 6 and progress.left() is None
    assert [r["batch"] for r in progress.rows] == [0, 1, 2, 3, 4, 5]
    assert [r["rollout/raw_reward"] for r in progress.rows][-2:] == [0.5, 0.75]
    trains(6, 3.0)
    assert progress.left() == pytest.approx(93 * 3.0)


def test_a_line_in_a_pipe_has_what_the_row_has(tmp_path: Path) -> None:
    file, out = tmp_path / "metrics.jsonl", io.StringIO()
    file.write_text(row(0) + json.dumps({"batch": 1, "train/loss": None}) + "\n")
    with PlainView(Progress(file, total=2), out) as view:
        view.tick([])
        view.tick([])
    first, second = out.getvalue().splitlines()
    assert first == "batch 1/2  reward 0.500  length 12.3  loss -0.2500  staleness 2  tokens/s 2,048  left -"
    assert second.startswith("batch 2/2  reward -  length -  loss -")


def test_the_table_shows_the_last_rows(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    progress = Progress(file, total=50)
    view = TableView(progress, "demo-1")
    console = Console(width=100, file=io.StringIO())
    console.print(view.render([]))
    assert "starting" in console.file.getvalue()  # type: ignore[attr-defined]
    file.write_text("".join(row(batch) for batch in range(20)))
    progress.update()
    console.print(view.render([]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "demo-1" in text and "20/50" in text and "9/50" in text and " 8/50" not in text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.4, "0s"), (187, "3m07s"), (7500, "2h05m")])
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text

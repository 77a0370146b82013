"""relax-logs: merged, ordered, filtered, followed."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from relax.logs.cli import main
from relax.logs.read import LogFiles, Record, follow


def line(second: float, service: str, event: str, level: str = "info", **ids: object) -> str:
    time = f"2026-01-01T00:00:{second:09.6f}+00:00"
    return json.dumps({"time": time, "level": level, "service": service, "event": event, **ids}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "controller.jsonl").write_text(
        line(1, "controller", "issued", group=1)
        + line(3, "controller", "committed", batch=3, groups=[1, 2])
        + line(5, "controller", "failed", "error", error="OSError: full", traceback="Traceback\n  here")
    )
    (logs / "rollout-0.jsonl").write_text(line(2, "rollout-0", "sampled", group=1) + line(4, "rollout-0", "x", "debug"))
    (logs / "rollout-1.jsonl").write_text(line(2.5, "rollout-1", "sampled", group=2))
    return tmp_path


def events(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(text)["event"] for text in capsys.readouterr().out.splitlines()]


def test_logs_of_all_services_are_one_ordered_by_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert events(capsys, str(run_dir)) == ["issued", "sampled", "sampled", "committed", "x", "failed"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--service", "rollout-0"], ["sampled", "x"]),
        (["--service", "rollout"], ["sampled", "sampled", "x"]),
        (["--service", "*-1", "--service", "controller"], ["issued", "sampled", "committed", "failed"]),
        (["--level", "info"], ["issued", "sampled", "sampled", "committed", "failed"]),
        (["--level", "error"], ["failed"]),
        (["--where", "group=1"], ["issued", "sampled"]),
        (["--where", "group=1", "--where", "event=sampled"], ["sampled"]),
        (["--where", "groups=2"], ["committed"]),
        (["--where", "batch=33"], []),
    ],
)
def test_filters(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], expected: list[str]
) -> None:
    assert events(capsys, str(run_dir), *arguments) == expected


def test_raw_lines_are_exactly_those_that_were_written(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_dir), "--json", "--service", "rollout-1"])
    assert capsys.readouterr().out == (run_dir / "logs" / "rollout-1.jsonl").read_text()


def test_pretty_lines_have_time_level_service_event_and_ids(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["00:00:01.000", "info", "controller", "issued", "group=1"]
    assert lines[-3].split()[:4] == ["00:00:05.000", "error", "controller", "failed"]
    assert "error=OSError: full" in lines[-3] and lines[-1] == "      here"


def test_a_line_cut_short_by_a_kill_is_counted_not_fatal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run_dir / "logs" / "rollout-1.jsonl").open("a") as file:
        file.write('{"time": "2026\n3\n' + line(6, "rollout-1", "again"))
    assert main([str(run_dir), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["event"] == "again" and "2 lines" in shown.err


def test_a_service_includes_its_ranks(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "logs" / "actor.rank1.jsonl").write_text(line(9, "actor.rank1", "follows"))
    assert events(capsys, str(run_dir), "--service", "actor") == ["follows"]
    assert events(capsys, str(run_dir), "--service", "act") == []


def test_a_place_without_logs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "name a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["batch", "=3"])
def test_a_condition_without_key_and_value_is_refused(run_dir: Path, where: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main([str(run_dir), "--where", where])
    assert refused.value.code == 2


def test_following_shows_new_lines_and_new_files_in_order_of_time(run_dir: Path) -> None:
    logs = run_dir / "logs"
    steps = iter(
        [
            lambda: (logs / "actor.jsonl").write_text(line(7, "actor", "stepped")),
            # Written later, happened earlier: must come first.
            lambda: (logs / "reward-0.jsonl").write_text(line(6, "reward-0", "scored")),
            lambda: None,
            lambda: None,
        ]
    )
    shown: list[Record] = []

    class EnoughError(Exception):
        pass

    def sleep(_: float) -> None:
        step = next(steps, None)
        if step is None:
            raise EnoughError
        step()

    with pytest.raises(EnoughError):
        for record in follow(LogFiles(logs), sleep):
            shown.append(record)
    assert [record.data["event"] for record in shown][-3:] == ["failed", "scored", "stepped"]
    assert len(shown) == 8


def test_a_reader_that_has_had_enough_is_no_error(run_dir: Path) -> None:
    log = run_dir / "logs" / "controller.jsonl"
    log.write_text(log.read_text() * 5000)
    command = f"{sys.executable} -m relax.logs.cli {run_dir} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout.splitlines()) == 1

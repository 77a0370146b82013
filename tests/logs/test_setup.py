"""Every record of a process becomes one JSON object a line."""

import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from relax.logs import setup


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    structlog.reset_defaults()


def rows(path: Path) -> list[dict[str, object]]:
    def no_constant(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines()]


def test_a_line_leads_with_time_level_service_and_event_and_carries_the_ids(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "controller.jsonl"
    setup.configure(path, "controller", run="abc")
    structlog.get_logger("relax").bind(batch=3).info("committed", groups=[1, 2])
    (row,) = rows(path)
    assert list(row)[:4] == ["time", "level", "service", "event"]
    assert row["level"] == "info" and row["service"] == "controller" and row["event"] == "committed"
    assert row["batch"] == 3 and row["groups"] == [1, 2] and row["run"] == "abc"
    stamp = str(row["time"])
    assert len(stamp) == len("2026-01-01T00:00:00.000000+00:00") and stamp.endswith("+00:00")


def test_records_of_libraries_land_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.jsonl"
    setup.configure(path, "rollout-0")
    library = logging.getLogger("some_engine")
    own = logging.StreamHandler()
    library.addHandler(own)
    library.propagate = False
    setup.adopt("some_engine")
    library.warning("cache of %d MiB", 64, extra={"version": 2})
    warnings.warn("slow path", stacklevel=1)
    first, second = rows(path)
    assert first["event"] == "cache of 64 MiB" and first["version"] == 2 and first["logger"] == "some_engine"
    assert first["service"] == "rollout-0" and first["level"] == "warning"
    assert "slow path" in str(second["event"])


def test_an_exception_keeps_its_type_message_and_traceback(tmp_path: Path) -> None:
    path = tmp_path / "reward-0.jsonl"
    setup.configure(path, "reward-0")
    try:
        raise LookupError("no such sample")
    except LookupError:
        structlog.get_logger("relax").exception("scoring failed", sample=7)
        logging.getLogger("library").exception("and there")
    for row in rows(path):
        assert row["level"] == "error" and row["error"] == "LookupError: no such sample"
        assert "Traceback" in str(row["traceback"]) and "test_setup.py" in str(row["traceback"])


def test_records_below_the_level_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    setup.configure(path, "a", "warning")
    structlog.get_logger("relax").info("quiet")
    logging.getLogger("library").info("quiet")
    structlog.get_logger("relax").warning("loud")
    assert [row["event"] for row in rows(path)] == ["loud"]


def test_odd_values_never_break_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    setup.configure(path, "a")
    structlog.get_logger("relax").info(
        "odd",
        nan=float("nan"),
        inf=[np.float32("inf")],
        scalar=np.int64(3),
        array=np.array([1.5, 2.0]),
        path=Path("x"),
        raw=b"\x01",
        text="line\nbreak \ud800",
        keys={1: 2},
    )
    (row,) = rows(path)
    assert row["nan"] == "nan" and row["inf"] == ["inf"] and row["scalar"] == 3 and row["array"] == [1.5, 2.0]
    assert row["path"] == "x" and row["raw"] == "01"


def test_a_second_call_replaces_the_first(tmp_path: Path) -> None:
    setup.configure(tmp_path / "a.jsonl", "a")
    setup.configure(tmp_path / "b.jsonl", "b")
    structlog.get_logger("relax").info("once")
    assert rows(tmp_path / "a.jsonl") == []
    assert [row["service"] for row in rows(tmp_path / "b.jsonl")] == ["b"]


def test_uncaught_exceptions_of_main_and_other_threads_are_logged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = f"""
import pathlib, threading
from relax.logs import setup
setup.configure(pathlib.Path({str(path)!r}), "actor")
thread = threading.Thread(target=lambda: 1 / 0, name="train")
thread.start(); thread.join()
raise RuntimeError("weights are gone")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "weights are gone" in done.stderr
    in_thread, in_main = rows(path)
    assert in_thread["level"] == "critical" and in_thread["thread"] == "train"
    assert str(in_thread["error"]).startswith("ZeroDivisionError")
    assert in_main["error"] == "RuntimeError: weights are gone" and in_main["service"] == "actor"


def test_lines_of_several_processes_in_one_file_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = f"""
import pathlib, sys, structlog
from relax.logs import setup
setup.configure(pathlib.Path({str(path)!r}), sys.argv[1])
for i in range(200):
    structlog.get_logger("relax").info("x" * 5000, i=i)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert len(rows(path)) == 400

"""Rows are read while they are written; of a batch that was trained again the last one counts."""

import json
from pathlib import Path

from relax.metrics.history import History, Tail, end_of_rows, read_rows


def row(batch: int, lineage: int = 0) -> str:
    return json.dumps({"batch": batch, "lineage": lineage}) + "\n"


def test_each_row_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.read() == []
    file.write_text(row(0) + row(1)[:20])
    assert [r["batch"] for r in tail.read()] == [0]
    assert tail.read() == []
    with file.open("a") as more:
        more.write(row(1)[20:] + row(2))
    assert [r["batch"] for r in tail.read()] == [1, 2]


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("{\n[]\n\n" + json.dumps({"step": 1}) + "\n" + row(0))
    assert [r["batch"] for r in Tail(file).read()] == [0]


def test_a_later_life_voids_the_rows_from_its_cut_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_rows(file) == [] and end_of_rows(file) == 0
    lives = [(0, range(8)), (1, range(5, 7)), (2, range(6, 9)), (3, range(2, 3))]
    counted = []
    for lineage, batches in lives:
        with file.open("a") as more:
            more.write("".join(row(batch, lineage) for batch in batches))
        counted.append([(r["batch"], r["lineage"]) for r in read_rows(file)])
    before = [(batch, 0) for batch in range(5)]
    assert counted[1] == [*before, (5, 1), (6, 1)], (
        "7 of the first life is not counted before the second has come to it"
    )
    assert counted[2] == [*before, (5, 1), (6, 2), (7, 2), (8, 2)]
    assert counted[3] == [(0, 0), (1, 0), (2, 3)]
    whole = file.stat().st_size
    with file.open("a") as torn:
        torn.write('{"batch": 3')
    assert end_of_rows(file) == whole and len(read_rows(file)) == 3


def test_only_so_many_rows_are_kept() -> None:
    history = History(keep=3)
    for batch in (0, 1, 2, 3, 4, 3):
        history.add({"batch": batch})
    assert [r["batch"] for r in history] == [2, 3] and len(history) == 2
    history.begin(3)
    assert [r["batch"] for r in history] == [2]

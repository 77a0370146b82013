"""metrics.jsonl over the lives of a run."""

import json
from pathlib import Path

from relax.metrics.rows import BatchRows

WHO = frozenset({"controller", "actor"})


def close(rows: BatchRows, batch: int) -> None:
    for who in sorted(WHO):
        rows.report(batch, who, {f"perf/{who}": ("sum", 1.0, 1.0)})
    rows.close_due()


def test_a_resumed_run_appends_rows_of_its_lineage_from_its_first_batch_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = BatchRows(path, WHO, 0, 2, 10.0)
    for batch in range(4):
        close(first, batch)
    second = BatchRows(path, WHO, 1, 2, 10.0, first_batch=2)
    close(second, 1)  # a late report of the life before
    for batch in (2, 3, 4):
        close(second, batch)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["lineage"], r["batch"], r["version"], r["step"]) for r in rows] == [
        (0, 0, 1, 2),
        (0, 1, 2, 4),
        (0, 2, 3, 6),
        (0, 3, 4, 8),
        (1, 2, 3, 6),
        (1, 3, 4, 8),
        (1, 4, 5, 10),
    ]


def test_a_row_that_was_not_written_to_its_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    close(BatchRows(path, WHO, 0, 2, 10.0), 0)
    with path.open("a") as file:
        file.write('{"batch": 1, "los')
    close(BatchRows(path, WHO, 1, 2, 10.0, first_batch=1), 1)
    assert [json.loads(line)["batch"] for line in path.read_text().splitlines()] == [0, 1]

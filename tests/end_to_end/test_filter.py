"""A filter in a real run: what it does not want is dropped, counted and replaced; where it fails, drawn again."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tiny_run

from relax.ledger import queries

FILTER = """
def choose(rewards, row, **rest):
    word = row["answer"]
    if sum(map(ord, word)) % 16 == 0:
        raise ValueError(word)
    return "third" if len(word) % 3 == 0 else True
"""


@pytest.mark.long
def test_what_a_filter_does_not_want_is_dropped_counted_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "wanted.py").write_text(FILTER)
    chosen = "wanted:choose"
    run = tiny_run.launch(tmp_path, dynamic_sampling_filter_path=chosen, max_staleness=1, use_tis=True)
    assert run.code == 0, run.output
    assert [row["batch"] for row in run.rows] == list(range(6))
    trained = pq.read_table(run.directory / "samples").to_pylist()
    # spell_backward asks for the answer's letters in reverse order.
    words = {row["prompt"].split(":")[-1].strip() for row in trained}
    assert len({row["group"] for row in trained}) == 6 * 4
    assert not any(len(word) % 3 == 0 or sum(map(ord, word)) % 16 == 0 for word in words), words
    with queries.read(run.directory / "ledger.sqlite") as ledger:
        dropped = dict(ledger.execute("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"))
        (holds,) = ledger.execute("SELECT issued = trained + dropped + in_flight FROM conservation").fetchone()
    assert dropped["third"] > 0 and holds
    failed = run.events("advantages", "filter_failed")
    assert failed and all(f"--dynamic-sampling-filter-path {chosen}: raised ValueError" in e["detail"] for e in failed)
    for reason in ("third", "filter_failed"):
        # Drops after the last batch was trained are in no row.
        told = sum(row.get(f"rollout/dropped/{reason}", 0) for row in run.rows)
        assert 0 < told <= dropped[reason] if reason in dropped else told > 0

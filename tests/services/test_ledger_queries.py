"""The queries of docs/operations.md on the ledger of a run in which all that they ask about has happened."""

import re
import sqlite3
from pathlib import Path

import pytest
from desk import Desk, desk, sender

from relax.ledger.queries import read
from relax.protocol.messages import Filtered, HandedBack, Ready, Rejected, RewardDone

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
BLOCKS = "\n".join(re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL))
QUERIES: dict[str, str] = dict(re.findall(r"-- (\d+\. .*?)\n(.*?;)", BLOCKS, re.DOTALL))


def play(it: Desk) -> None:
    """Four batches; the first groups are rejected, filtered and handed back, the last are still open."""
    turned_away = False
    for batch in range(4):
        it.turn()
        orders = it.orders()
        if not turned_away:
            first, second, third = (order.lease for order in orders[:3])
            it.groups.rejected(Rejected(first, "reward", "reward_error", "it raised"), sender("reward-0"))
            it.sampled(second)
            it.groups.filtered(Filtered(second, "zero_std"), sender("advantages-0"))
            holder = it.book[third.group].holder
            it.groups.handed_back(HandedBack(third, None, None), sender(holder or ""))
            orders, turned_away = orders[3:], True
        for order in orders:
            it.sampled(order.lease, it.gate.version)
            it.groups.reward_done(RewardDone(order.lease, "advantages-0.1"), sender("reward-0"))
            it.groups.ready(Ready(order.lease, it.gate.version, 5), sender("advantages-0"))
        it.turn()
        for assemble in it.committed():
            it.started(assemble.batch)
            it.trained(assemble.batch)
            it.published(assemble.batch + 1)
            for replica in list(it.replicas):
                it.serves(replica.member.name, assemble.batch + 1)
        assert it.gate.version >= batch, "the script goes on"
    it.turn()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> sqlite3.Connection:
    folder = tmp_path_factory.mktemp("run")
    it = desk(folder, rollouts=2, num_rollout=9, rollout_batch_size=4, max_staleness=2, use_tis=True)
    play(it)
    it.ledger.flush(10)
    return read(folder / "ledger.sqlite")


def test_the_page_has_ten_queries() -> None:
    assert [question.split(".")[0] for question in QUERIES] == [str(i) for i in range(1, 11)]


@pytest.mark.parametrize("question", QUERIES)
def test_a_query_of_the_page_finds_what_happened(ledger: sqlite3.Connection, question: str) -> None:
    cursor = ledger.execute(QUERIES[question])
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    assert rows, question
    # What is found is of the run: no column is empty in all rows.
    assert all(any(row[name] is not None for row in rows) for name in names), rows


def test_the_answers_are_those_of_the_run(ledger: sqlite3.Connection) -> None:
    answers = {question.split(".")[0]: ledger.execute(sql).fetchall() for question, sql in QUERIES.items()}
    ((_, issued, trained, dropped, in_flight, holds),) = answers["1"]
    assert holds and issued == trained + dropped + in_flight and trained >= 8 and in_flight > 0
    assert {reason: n for reason, n, *_ in answers["4"]} == {"reward_error": 1, "zero_std": 1}
    assert ("lost", "issued") in {row[:2] for row in answers["9"]}
    assert {row[0] for row in answers["8"]} == {"rollout-0", "rollout-1"}
    assert (
        sum(n for *_, n in answers["2"])
        == ledger.execute("SELECT count(*) FROM groups WHERE ended_at IS NULL").fetchone()[0]
    )

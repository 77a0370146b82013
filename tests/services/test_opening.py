"""How a life of the pipeline begins, from a run directory as a crash left it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.checkpoints import CheckpointDirectory
from relax.data import DataError, PromptRules, PromptSource, PromptStream, PromptTokenizer, open_source
from relax.launch.rundir import RunDir
from relax.ledger import GroupBook, LedgerError, State
from relax.ledger.queries import conservation, read
from relax.services.control.draws import Draws
from relax.services.control.opening import open_ledger, open_prompts
from relax.services.control.saving import LEDGER, LEDGER_FILE

TINY = Path(__file__).resolve().parents[2] / "topologies" / "tiny"


@pytest.fixture
def source(tmp_path: Path) -> PromptSource:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(5)))
    return open_source(str(path), seed=0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir.create(tmp_path / "run")
    yield run
    run.leave()


def opened(draws: Draws, source: PromptSource, revived=None, seed: int = 3) -> PromptStream:  # type: ignore[no-untyped-def]
    rules = PromptRules("prompt")
    return open_prompts(draws, revived, source, PromptTokenizer(TINY), rules, seed=seed, num_epoch=2, ahead=8)


def issue(draws: Draws, book: GroupBook, count: int) -> list[tuple[int, int, int]]:
    """(group, prompt id, epoch) of the groups that are issued next."""
    issued: list[tuple[int, int, int]] = []
    while len(issued) < count:
        for draw in draws.again() or draws.fresh():
            prompt = draw.prompt
            if draw.group not in book:
                book.draw(draw.group, prompt.prompt_id, prompt.epoch, prompt.index)
            book.issue(draw.group, "rollout-0", 0)
            draws.issued(draw)
            issued.append((draw.group, prompt.prompt_id, prompt.epoch))
            if len(issued) == count:
                break
    return issued


def save(run: RunDir, ledger, batch: int) -> None:  # type: ignore[no-untyped-def]
    directory = CheckpointDirectory(run.checkpoints_dir)
    writing = directory.begin(batch)
    ledger.backup(writing.part(LEDGER) / LEDGER_FILE, 30)
    writing.close_part(LEDGER)
    directory.complete(writing, parts=[LEDGER], run_id=run.run_id, lineage=run.lineage)


def first_life(run: RunDir, source: PromptSource) -> list[tuple[int, int, int]]:
    """Draws seven of ten prompts, trains two of them in batch 0, saves, trains one more. Returns what it drew."""
    ledger, revived = open_ledger(run)
    assert revived is None
    draws, book = Draws(), GroupBook()
    stream = opened(draws, source)
    issued = issue(draws, book, 7)
    for batch, groups in enumerate([(0, 2), (1,)]):
        for group in groups:
            book.advance(book.lease(group), State.READY, oldest=0, tokens=1)
        book.commit(batch, groups)
        book.started(batch)
        book.trained(batch)
        book.save(ledger)
        if batch == 0:
            save(run, ledger, 1)
    ledger.close()
    stream.close()
    run.leave()
    return issued


def test_a_resume_draws_what_was_open_and_then_what_was_never_drawn(run: RunDir, source: PromptSource) -> None:
    before = first_life(run, source)
    again = RunDir.resume(run.path, 1)
    ledger, revived = open_ledger(again)
    assert revived is not None
    draws, book = Draws(), GroupBook(again.lineage)
    book.revive(revived)
    stream = opened(draws, source, revived)
    issued = issue(draws, book, 8)
    assert issued[:5] == [one for one in before if one[0] not in (0, 2)]
    assert [group for group, *_ in issued[5:]] == [7, 8, 9]
    drawn = [(prompt, epoch) for _, prompt, epoch in [*before, *issued[5:]]]
    assert sorted(drawn) == [(prompt, epoch) for prompt in range(5) for epoch in range(2)]
    assert draws.stream_ended
    book.save(ledger)
    ledger.close()
    stream.close()
    connection = read(again.ledger)
    assert connection.execute("SELECT * FROM lineages").fetchall()[1][:3] == (1, 0, 1)
    assert conservation(connection).in_flight == {State.ISSUED: 8}
    connection.close()
    assert (again.path / "ledger.before-1.sqlite").is_file()
    again.leave()


def test_a_run_that_saved_nothing_begins_anew_as_a_lineage_of_its_own(run: RunDir, source: PromptSource) -> None:
    first_life(run, source)
    again = RunDir.resume(run.path, 0)
    ledger, revived = open_ledger(again)
    assert revived is None
    ledger.close()
    connection = read(again.ledger)
    assert connection.execute("SELECT lineage, parent, first_batch FROM lineages").fetchall() == [(1, None, 0)]
    connection.close()
    assert (again.path / "ledger.before-1.sqlite").is_file()
    again.leave()


def test_a_ledger_that_is_damaged_or_missing_is_named(run: RunDir, source: PromptSource) -> None:
    first_life(run, source)
    again = RunDir.resume(run.path, 1)
    assert again.checkpoint is not None
    copy = again.checkpoint / LEDGER / LEDGER_FILE
    copy.rename(copy.with_name("elsewhere"))
    with pytest.raises(LedgerError, match=r"checkpoints/1/ledger/ledger\.sqlite does not exist"):
        open_ledger(again)
    assert again.ledger.is_file(), "the run's own is where it was"
    again.leave()


def test_other_prompts_than_before_are_refused(run: RunDir, source: PromptSource) -> None:
    first_life(run, source)
    again = RunDir.resume(run.path, 1)
    ledger, revived = open_ledger(again)
    with pytest.raises(DataError, match=r"was drawn at position \d of epoch \d, and there is prompt \d now"):
        opened(Draws(), source, revived, seed=4)
    ledger.close()
    again.leave()

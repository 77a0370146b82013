import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.data import (
    DataError,
    Position,
    Prompt,
    PromptReader,
    PromptRules,
    PromptSource,
    PromptStream,
    PromptTokenizer,
    open_source,
)
from relax.data.stream import epoch_order


@pytest.fixture
def source(tmp_path: Path) -> PromptSource:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * (i + 1), "n": i}) + "\n" for i in range(7)))
    return open_source(str(path), seed=0)


@pytest.fixture
def streams(source: PromptSource, checkpoint: Path) -> Iterator:
    opened: list[PromptStream] = []

    def make(max_len: int | None = None, overlong: str = "refuse", **settings) -> PromptStream:
        rules = PromptRules("prompt", max_len=max_len, overlong=overlong)
        stream = PromptStream(source, PromptTokenizer(checkpoint), rules, **{"seed": 3, **settings})
        opened.append(stream)
        return stream

    yield make
    for stream in opened:
        stream.close()


def take(stream: PromptStream, count: int | None = None) -> list[Prompt]:
    async def run() -> list[Prompt]:
        taken: list[Prompt] = []
        while count is None or len(taken) < count:
            prompt = await stream.next(10)
            if prompt is None:
                break
            taken.append(prompt)
        return taken

    return asyncio.run(run())


def test_every_epoch_holds_every_row_once_in_another_order(streams) -> None:
    prompts = take(streams(num_epoch=3))
    orders = [[p.prompt_id for p in prompts if p.epoch == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert [(p.epoch, p.index) for p in prompts] == [(e, i) for e in range(3) for i in range(7)]


def test_order_depends_on_seed_and_epoch_alone(streams) -> None:
    def order(**settings) -> list[int]:
        return [p.prompt_id for p in take(streams(num_epoch=2, **settings))]

    assert order() == order(ahead=1)
    assert order() != order(seed=4)


def test_order_is_pinned_across_releases() -> None:
    # A resumed run must meet the order of the run it continues, also after an update of numpy.
    assert epoch_order(1234, 2, 8).tolist() == [7, 2, 6, 0, 5, 3, 1, 4]


def test_stream_carries_over_into_the_next_epoch(streams) -> None:
    prompts = take(streams(), 10)
    assert Counter(p.epoch for p in prompts) == {0: 7, 1: 3}


@pytest.mark.parametrize("taken", [0, 3, 7, 9])
def test_stream_resumes_at_its_position(streams, taken: int) -> None:
    whole = [(p.epoch, p.prompt_id) for p in take(streams(num_epoch=2))]
    first = streams(num_epoch=2)
    take(first, taken)
    rest = take(streams(num_epoch=2, at=first.position))
    assert [(p.epoch, p.prompt_id) for p in rest] == whole[taken:]


def test_stream_at_its_end_yields_nothing(streams) -> None:
    stream = streams(num_epoch=1, at=Position(1, 0))
    assert take(stream) == [] and stream.ended


def test_prompts_carry_tokens_text_and_their_row(streams) -> None:
    for prompt in take(streams(), 7):
        assert prompt.text == "a" * (prompt.prompt_id + 1)
        assert prompt.token_ids.tolist() == [1] + [4] * (prompt.prompt_id + 1)
        assert json.loads(prompt.row)["n"] == prompt.prompt_id


def test_overlong_prompts_are_filtered_and_counted_at_the_position(streams) -> None:
    stream = streams(max_len=5, overlong="filter", num_epoch=2, ahead=2)
    seen = 0
    while (prompts := take(stream, 1)) != []:
        seen += 1
        assert len(prompts[0].token_ids) <= 5
        # Left out so far = places passed in the order - prompts handed out.
        assert stream.filtered == prompts[0].epoch * 7 + prompts[0].index + 1 - seen
    assert seen == 8


def test_overlong_prompt_is_refused_by_name(streams) -> None:
    with pytest.raises(DataError, match=r"p\.jsonl line \d: the prompt has \d tokens, over --rollout-max-prompt-len 5"):
        take(streams(max_len=5), 14)


def test_dataset_of_which_nothing_fits_ends_with_an_error(streams) -> None:
    with pytest.raises(DataError, match="all 7 prompts are longer"):
        take(streams(max_len=1, overlong="filter"), 1)


def test_bad_row_is_raised_where_prompts_are_taken_after_the_good_ones(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "b"}\n')
    rules = PromptRules("prompt")
    stream = PromptStream(open_source(str(path), seed=0), PromptTokenizer(checkpoint), rules, seed=0, num_epoch=1)
    with pytest.raises(DataError, match="line 2: field 'prompt' is a int"):
        take(stream)
    stream.close()


def test_next_gives_up_at_its_deadline(checkpoint: Path) -> None:
    release = threading.Event()

    class Stuck:
        def __len__(self) -> int:
            return 1

        def row(self, index: int) -> dict:
            release.wait(20)
            return {"prompt": "a"}

        def where(self, index: int) -> str:
            return "row"

    stream = PromptStream(Stuck(), PromptTokenizer(checkpoint), PromptRules("prompt"), seed=0)
    with pytest.raises(TimeoutError, match="no prompt was tokenized within"):
        asyncio.run(stream.next(0.05))
    release.set()
    assert [prompt.epoch for prompt in take(stream, 3)] == [0, 1, 2]  # the thread outlived the loop that gave up
    stream.close()


def test_works_ahead_only_up_to_its_bound(source: PromptSource, checkpoint: Path) -> None:
    reads: list[int] = []
    reached = threading.Event()

    class Counting:
        def __len__(self) -> int:
            return len(source)

        def row(self, index: int) -> dict:
            reads.append(index)
            if len(reads) == 4:
                reached.set()
            return source.row(index)

        def where(self, index: int) -> str:
            return source.where(index)

    stream = PromptStream(Counting(), PromptTokenizer(checkpoint), PromptRules("prompt"), seed=0, ahead=3)
    assert reached.wait(10)
    stream.close()
    assert len(reads) == 4  # three ready, one in hand


@pytest.mark.parametrize("max_len", [None, 4])
def test_prompts_are_read_again_as_they_were_handed_out(streams, source, checkpoint: Path, max_len: int | None) -> None:
    prompts = take(streams(max_len, "filter", num_epoch=3))
    reader = PromptReader(source, PromptTokenizer(checkpoint), PromptRules("prompt", False, max_len, "filter"), seed=3)
    wanted = prompts[::-1]
    again = reader.again([(prompt.prompt_id, Position(prompt.epoch, prompt.index)) for prompt in wanted])
    for one, other in zip(wanted, again, strict=True):
        assert (one.prompt_id, one.epoch, one.index, one.text, one.row) == (
            other.prompt_id,
            other.epoch,
            other.index,
            other.text,
            other.row,
        )
        assert one.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize(
    ("prompt_id", "index", "max_len", "told"),
    [
        (5, 0, None, "prompt 5 was drawn at position 0 of epoch 0, and there is prompt {first} now"),
        (6, 7, None, "prompt 6 was drawn at position 7 of epoch 0, and there is no prompt now"),
        (None, 0, 0, "and there is one left out now"),
    ],
)
def test_data_that_changed_is_refused(
    source, checkpoint: Path, prompt_id: int | None, index: int, max_len: int | None, told: str
) -> None:
    first = int(epoch_order(3, 0, 7)[0])
    assert first != 5
    reader = PromptReader(source, PromptTokenizer(checkpoint), PromptRules("prompt", False, max_len, "filter"), seed=3)
    with pytest.raises(DataError, match=told.format(first=first)):
        reader.again([(first if prompt_id is None else prompt_id, Position(0, index))])


@pytest.mark.parametrize("cut", range(22))
def test_a_stream_goes_on_at_any_cut(streams, cut: int) -> None:
    """Seven prompts in three epochs; a cut behind the last of an epoch, and one behind the last of all."""
    whole = [(prompt.epoch, prompt.prompt_id) for prompt in take(streams(num_epoch=3))]
    at = Position(0, 0) if cut == 0 else Position((cut - 1) // 7, (cut - 1) % 7 + 1)
    rest = [(prompt.epoch, prompt.prompt_id) for prompt in take(streams(num_epoch=3, at=at))]
    assert rest == whole[cut:]

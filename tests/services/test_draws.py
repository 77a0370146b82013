"""Which prompt is sampled next."""

from desk import Prompts

from relax.gate.stragglers import STRIKES
from relax.protocol.payload import Payload
from relax.services.control.draws import Draw, Draws


def draws(prompts: int) -> Draws:
    it = Draws()
    it.begin(Prompts(prompts))  # type: ignore[arg-type]
    return it


def issue_fresh(it: Draws, count: int) -> list[int]:
    """The ids of the groups that were issued, fewer than `count` where the stream ends."""
    groups = []
    for draw in it.fresh():
        it.issued(draw)
        groups.append(draw.group)
        if len(groups) == count:
            break
    return groups


def waiting(it: Draws) -> list[tuple[int, int, int]]:
    return [(draw.group, draw.prompt.prompt_id, draw.attempt) for draw in it.again()]


def test_groups_are_numbered_as_they_are_issued() -> None:
    it = draws(5)
    assert issue_fresh(it, 3) == [0, 1, 2]
    assert [it[group].prompt.prompt_id for group in range(3)] == [0, 1, 2]
    assert issue_fresh(it, 3) == [3, 4]
    assert it.stream_ended


def test_a_fresh_prompt_that_is_not_issued_stays_the_next_one() -> None:
    it = draws(2)
    assert [draw.group for draw in it.fresh()] == [0]
    assert issue_fresh(it, 1) == [0]
    assert it[0].prompt.prompt_id == 0


def test_draws_to_be_done_again_come_in_group_order() -> None:
    it = draws(4)
    issue_fresh(it, 4)
    it.lost(3)
    it.rejected(1)
    it.lost(0, Payload.inline({}))
    assert waiting(it) == [(0, 0, 0), (1, 1, 1), (3, 3, 0)]
    assert [draw.parked is not None for draw in it.again()] == [True, False, False]
    assert it.coming_back == 1, "the lost ones hold their slots"


def test_what_was_parked_goes_with_the_issue() -> None:
    it = draws(1)
    issue_fresh(it, 1)
    it.lost(0, Payload.inline({}))
    (draw,) = it.again()
    it.issued(draw)
    assert (draw.lost, draw.parked, it.waiting) == (False, None, False)


def test_a_prompt_is_set_aside_after_its_strikes() -> None:
    it = draws(1)
    issue_fresh(it, 1)
    for _ in range(STRIKES - 1):
        assert it.rejected(0)
        it.issued(it.again()[0])
    assert not it.rejected(0)
    assert not it.waiting


def test_a_parked_draw_that_is_rejected_starts_anew() -> None:
    it = draws(1)
    issue_fresh(it, 1)
    it.lost(0, Payload.inline({}))
    assert it.rejected(0)
    (draw,) = it.again()
    assert (draw.lost, draw.parked, draw.attempt) == (False, None, 1)


def test_surplus_prompts_come_back_before_the_stream_as_new_groups_with_their_attempt() -> None:
    it = draws(9)
    issue_fresh(it, 4)
    it.rejected(2)
    it.issued(it.again()[0])
    assert [it.surplus(group).group for group in (2, 3)] == [4, 5]
    assert waiting(it) == [(4, 2, 1), (5, 3, 0)]
    for draw in it.again():
        it.issued(draw)
    assert issue_fresh(it, 1) == [6]
    assert it[6].prompt.prompt_id == 4, "the stream goes on where it was"


def test_a_batch_is_available_with_what_waits_and_what_is_fresh() -> None:
    it = draws(3)
    issue_fresh(it, 1)
    it.rejected(0)
    assert it.available(3)
    assert it.available(4), "the stream has ended: there will be no more"


def test_revived_draws_wait_first_in_group_order_with_their_attempts_and_new_groups_follow_the_last() -> None:
    it = Draws()
    (a, b) = (draw.prompt for draw in (issued_once(0), issued_once(1)))
    it.begin(Prompts(3), [Draw(4, a, 1), Draw(2, b)], 7)  # type: ignore[arg-type]
    assert [(draw.group, draw.attempt, draw.lost) for draw in it.again()] == [(2, 0, False), (4, 1, False)]
    assert (it.waiting, it.coming_back) == (True, 2), "they hold no slot yet"
    for draw in it.again():
        it.issued(draw)
    assert not it.waiting
    assert issue_fresh(it, 2) == [7, 8]
    it.lost(4)
    assert [(draw.group, draw.attempt, draw.lost) for draw in it.again()] == [(4, 1, True)]
    assert it.rejected(4) and not it.rejected(4), "its strikes count from the attempt that it had"


def issued_once(prompt: int) -> Draw:
    it = draws(prompt + 1)
    issue_fresh(it, prompt + 1)
    return it[prompt]

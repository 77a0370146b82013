"""A run that cannot go on says so: groups that nobody can use, a service that was started twice, goodbyes unheard."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, desk, sender
from structlog.testing import capture_logs

from relax.gate.stragglers import STRIKES
from relax.ledger.states import State
from relax.protocol.messages import Filtered, Member, Register, Rejected
from relax.services.control.groups import FILTERED_BATCHES
from relax.services.controller import ALIVE_SECONDS
from relax.services.service import ServiceError, shared_options


def filter_group(it: Desk, group: int) -> None:
    it.groups.filtered(Filtered(it.book.lease(group), "too_few_rewards"), sender("advantages-0"))


def next_group(it: Desk) -> int:
    it.turn()
    return it.book.in_state(State.ISSUED)[0]


def test_groups_that_are_all_filtered_end_the_run_with_the_reason(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=1)
    for _ in range(FILTERED_BATCHES - 1):
        filter_group(it, next_group(it))
    group = next_group(it)
    with pytest.raises(ServiceError, match=f"{FILTERED_BATCHES} groups in a row.*too_few_rewards"):
        filter_group(it, group)


def test_one_usable_group_between_them_lets_the_run_go_on(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=1, max_staleness=2, use_tis=True)
    for _ in range(FILTERED_BATCHES - 1):
        filter_group(it, next_group(it))
    it.ready(it.book.lease(next_group(it)))
    filter_group(it, next_group(it))


def rejected(it: Desk, group: int, detail: str = "no label") -> Rejected:
    return Rejected(it.book.lease(group), "reward", "reward_exception", detail)


def test_a_prompt_whose_draws_are_all_rejected_is_set_aside_with_what_the_users_code_raised(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=2)
    with capture_logs() as logs:
        for attempt in range(STRIKES):
            it.turn()
            assert it.book[0].attempt == attempt
            it.groups.rejected(rejected(it, 0), sender("reward-0"))
    (told,) = [record for record in logs if record["event"] == "prompt_set_aside"]
    assert told["log_level"] == "error" and told["prompt_id"] == 0
    assert (told["stage"], told["reason"], told["error"]) == ("reward", "reward_exception", "no label")
    assert 0 not in it.book and it.book.conservation().dropped == {"reward_exception": 2, "set_aside": 1}
    assert it.pace.counts.values()["rollout/set_aside"] == 1


def test_prompts_that_are_all_set_aside_end_the_run(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=1)
    for _ in range(STRIKES - 1):
        it.groups.rejected(rejected(it, next_group(it)), sender("reward-0"))
    last = rejected(it, next_group(it))
    with pytest.raises(ServiceError, match="no label"):
        it.groups.rejected(last, sender("reward-0"))


def test_one_prompt_set_aside_among_many_groups_that_the_filter_drops_is_no_end(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=4)
    it.turn()
    for attempt in range(STRIKES):
        for _ in range(4):
            it.turn()
            filter_group(it, it.book.in_state(State.ISSUED)[-1])
        it.turn()
        assert it.book[0].attempt == attempt
        it.groups.rejected(rejected(it, 0), sender("reward-0"))
    assert it.book.conservation().dropped["set_aside"] == 1


def register(it: Desk, incarnation: str) -> Any:
    member = Member("rollout-0", "rollout", f"inproc://{incarnation}", incarnation)
    return it.on_register(Register(member, "", 7, shared_options(it.options)), None)


@pytest.mark.parametrize(
    ("silent", "told"),
    [(0.0, "rollout-0 runs already"), (ALIVE_SECONDS + 1, "rollout-0 .* died")],
    ids=["alive", "dead"],
)
def test_a_name_belongs_to_one_process_of_a_run(tmp_path: Path, silent: float, told: str) -> None:
    it = desk(tmp_path)
    it.registry.entries["rollout-0"].heard = time.monotonic() - silent

    async def second_life() -> int | None:
        it._open_for_members.set()
        it._ended = asyncio.get_running_loop().create_future()
        with pytest.raises(ServiceError, match=told):
            await register(it, "2")
        return it._ended.result() if it._ended.done() else None

    assert asyncio.run(second_life()) == (None if silent == 0.0 else 1)
    assert it.registry.entries["rollout-0"].member.incarnation == "1"

"""A run that cannot go on says so: groups that nobody can use, a service that was started twice, goodbyes unheard."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, desk, sender
from structlog.testing import capture_logs

from relax.gate.stragglers import STRIKES
from relax.ledger.states import State
from relax.protocol.messages import Filtered, Member, Register, Rejected
from relax.services.control.groups import FILTERED_BATCHES
from relax.services.control.registry import RegistrationError
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


def test_a_run_whose_data_is_all_filtered_before_there_is_a_batch_fails_and_says_so(tmp_path: Path) -> None:
    it = desk(tmp_path, prompts=3, rollout_batch_size=2, num_rollout=None, num_epoch=1)
    for _ in range(2):
        filter_group(it, next_group(it))
    it.turn()
    it.groups.rejected(rejected(it, 2), sender("reward-0"))
    filter_group(it, next_group(it))
    with pytest.raises(ServiceError, match=r"no batch was trained: .*\(1 reward_exception, 3 too_few_rewards\)"):
        it.turn()
    assert "finish" not in it.spawned


def test_a_run_whose_data_has_no_prompt_fails_and_says_so(tmp_path: Path) -> None:
    it = desk(tmp_path, prompts=0, num_rollout=None, num_epoch=1)
    with pytest.raises(ServiceError, match="no batch was trained: the data has no prompt"):
        it.turn()


def test_a_run_that_trained_a_batch_before_the_rest_was_filtered_is_done(tmp_path: Path) -> None:
    it = desk(tmp_path, prompts=3, rollout_batch_size=2, num_rollout=None, num_epoch=1)
    it.turn()
    for group in (0, 1):
        it.ready(it.book.lease(group))
    it.turn()
    it.started(0)
    it.trained(0)
    it.published(1)
    it.serves("rollout-0", 1)
    filter_group(it, next_group(it))
    it.turn()
    assert it.spawned == ["finish"]


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


def register(it: Desk, name: str, role: str, life: int) -> Any:
    """Its mailbox's question, and what came of it."""
    member = Member(name, role, f"inproc://{name}.{life}", f"{name}.{life}")

    async def ask() -> int | None:
        it._open_for_members.set()
        it._ended = asyncio.get_running_loop().create_future()
        try:
            await it.on_register(Register(member, "", 7, shared_options(it.options)), None)
        finally:
            it.code = it._ended.result() if it._ended.done() else None

    asyncio.run(ask())


def test_a_service_that_is_started_again_takes_the_place_of_its_earlier_life(tmp_path: Path) -> None:
    it = desk(tmp_path)
    register(it, "rollout-0", "rollout", 2)
    assert it.registry.entries["rollout-0"].member.incarnation == "rollout-0.2" and it.code is None
    assert it.registry.restarts == {"rollout-0": 1}
    with pytest.raises(RegistrationError, match="was a member and is none any more"):
        register(it, "rollout-0", "rollout", 1)  # a late message of the life that ended
    assert it.registry.entries["rollout-0"].member.incarnation == "rollout-0.2"


def test_an_actor_that_is_started_again_ends_the_run(tmp_path: Path) -> None:
    it = desk(tmp_path)
    with pytest.raises(ServiceError, match=r"actor-0 .* was started again as pid 7"):
        register(it, "actor-0", "actor", 2)
    assert it.code == 1 and it.registry.entries["actor-0"].member.incarnation == "actor-0.1"


def test_a_reference_that_was_refreshed_cannot_come_back(tmp_path: Path) -> None:
    chosen = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1, "ref_load": "r"}
    it = desk(tmp_path, **chosen)
    with pytest.raises(ServiceError, match=r"reference-0 .* the version that it was refreshed to"):
        register(it, "reference-0", "reference", 2)

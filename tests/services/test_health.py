"""A run that cannot go on is ended with the name of who is to blame."""

import asyncio
from pathlib import Path

import pytest
from desk import Desk, desk, sender

from relax.config.options import Options
from relax.protocol.messages import Heartbeat, Member, Register, RewardDone
from relax.services.control.health import trouble
from relax.services.control.registry import ALWAYS_NEEDED, Registry

OPTIONS = Options(startup_timeout=10, peer_timeout=20, stall_timeout=30)


def registry(*roles: str, heard: float = 0.0) -> Registry:
    it = Registry({}, ALWAYS_NEEDED)
    for role in roles:
        it.register(Register(Member(f"{role}-0", role, f"inproc://{role}", "1"), "", 1, {}), heard)
    return it


@pytest.mark.parametrize(
    ("who", "now", "moved", "told"),
    [
        (registry(*ALWAYS_NEEDED), 19.0, 0.0, None),
        (registry(*ALWAYS_NEEDED[1:]), 9.0, 0.0, None),
        (registry(*ALWAYS_NEEDED[1:]), 11.0, 0.0, f"no {ALWAYS_NEEDED[0]} service has joined"),
        (registry(*ALWAYS_NEEDED, heard=49.0), 49.0, 0.0, None),
        (
            registry(*ALWAYS_NEEDED, heard=51.0),
            51.0,
            0.0,
            "nothing has moved for --stall-timeout 30 s + --peer-timeout 20 s: batch 3 waits",
        ),
    ],
    ids=["well", "still joining", "missing", "a service that hangs may come again", "stalled"],
)
def test_trouble_names_who_and_how_long(who: Registry, now: float, moved: float, told: str | None) -> None:
    found = trouble(who, OPTIONS, now=now, started=0.0, moved=moved, waits=lambda: "batch 3 waits")
    assert found is None if told is None else found is not None and found.startswith(told)


def test_a_role_that_died_out_has_the_startup_timeout_to_come_back() -> None:
    it = registry(*ALWAYS_NEEDED)
    it.remove(it.entries["reward-0"].member, 100.0, died=True)

    def told(now: float) -> str | None:
        return trouble(it, OPTIONS, now=now, started=0.0, moved=now, waits=str)

    assert told(109.0) is None
    assert (told(111.0) or "").startswith("no reward service")


def test_who_could_not_be_heard_is_not_silent() -> None:
    it = registry("rollout")
    assert it.silent(21.0, 20.0) is not None
    it.bear_with(5.0)
    assert it.silent(21.0, 20.0) is None


# --- a run in which nothing moves ------------------------------------------------------------------------------------


def beat(it: Desk, activity: str, **counters: float) -> float:
    """The moment of the last progress after a heartbeat of the reward service."""
    told = {name.replace("__", "/"): count for name, count in counters.items()}
    asyncio.run(it.on_heartbeat(Heartbeat("reward-0", "reward-0.1", activity, told, {}), None))
    return it._moved


def test_waiting_is_no_progress_and_work_is(tmp_path: Path) -> None:
    it = desk(tmp_path)
    before = beat(it, "waiting for groups", samples=3)
    assert beat(it, "waiting for groups", samples=3, wait__silent_peer=60.0) == before
    worked = beat(it, "waiting for groups", samples=4, wait__silent_peer=60.0)
    assert worked > before
    assert beat(it, "scoring", samples=4, wait__silent_peer=60.0) > worked


def test_a_stall_names_the_groups_that_are_waited_for_and_who_has_them(tmp_path: Path) -> None:
    it = desk(tmp_path, rollout_batch_size=4, max_staleness=1, rollout_lead=0)
    it.turn()
    orders = it.orders()
    assert len(orders) == 4
    it.sampled(orders[0].lease)
    it.sampled(orders[1].lease)
    it.groups.reward_done(RewardDone(orders[1].lease, "advantages-0.1"), sender("reward-0"))
    it.groups.lost(orders[2].lease.group, "for the test")
    assert it._waits() == (
        "batch 0 waits for 4 more ready groups: 0, 1, 3, 2 (1 sampled by rollout-0 and sent to reward-0, "
        "1 scored by reward-0 and sent to advantages-0, 1 issued to rollout-0, 1 to be issued again)"
    )
    found = trouble(it.registry, OPTIONS, now=1e9, started=1e9, moved=0.0, waits=it._waits)
    assert found is not None and "1 scored by reward-0 and sent to advantages-0" in found

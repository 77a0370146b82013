"""A run that cannot go on is ended with the name of who is to blame."""

import pytest

from relax.config.options import Options
from relax.protocol.messages import Member, Register
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
        (registry(*ALWAYS_NEEDED, heard=31.0), 31.0, 0.0, "nothing has moved for --stall-timeout 30 s: batch 3 waits"),
    ],
    ids=["well", "still joining", "missing", "stalled"],
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

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
        (registry(*ALWAYS_NEEDED), 21.0, 21.0, f"{ALWAYS_NEEDED[0]}-0 has been silent for 21 s"),
        (registry(*ALWAYS_NEEDED, heard=31.0), 31.0, 0.0, "nothing has moved for --stall-timeout 30 s: batch 3 waits"),
    ],
    ids=["well", "still joining", "missing", "silent", "stalled"],
)
def test_trouble_names_who_and_how_long(who: Registry, now: float, moved: float, told: str | None) -> None:
    found = trouble(who, OPTIONS, now=now, started=0.0, moved=moved, waits=lambda: "batch 3 waits")
    assert found is None if told is None else found is not None and found.startswith(told)

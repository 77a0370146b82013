"""Who gets the next group: the emptiest replica with room that the gate allows."""

import random

import pytest

from relax.gate.placement import Placement


def test_the_emptiest_comes_first_and_equal_loads_go_by_name() -> None:
    placement = Placement()
    placement.serves("b", 3, 2)
    placement.serves("a", 3, 4)
    order = []
    while (choice := placement.choose(lambda version: True)) is not None:
        order.append(choice[0])
        placement.took(choice[0])
    assert order == ["a", "b", "a", "a", "b", "a"]


def test_the_gate_is_asked_once_a_version() -> None:
    placement, asked = Placement(), []
    for i in range(100):
        placement.serves(f"r{i}", i % 2, 1)
    assert placement.choose(lambda version: bool(asked.append(version))) is None
    assert sorted(asked) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_it_chooses_what_a_look_at_all_replicas_would(seed: int) -> None:
    rng, placement = random.Random(seed), Placement()
    seats: dict[str, list[int]] = {}  # name -> version, credit, held
    for _ in range(600):
        name = f"r{rng.randrange(8)}"
        act = rng.random()
        if name not in seats or act < 0.15:
            version, credit = rng.randrange(3), rng.randint(1, 4)
            seats.setdefault(name, [0, 0, 0])[:2] = [version, credit]
            placement.serves(name, version, credit)
        elif act < 0.2:
            del seats[name]
            placement.gone(name)
        elif act < 0.5 and seats[name][2]:
            seats[name][2] -= 1
            placement.gave(name)
        allowed = {version for version in range(3) if rng.random() < 0.7}
        but = f"r{rng.randrange(8)}" if rng.random() < 0.3 else ""
        open_ = sorted(
            (held / credit, n, version)
            for n, (version, credit, held) in seats.items()
            if held < credit and version in allowed and n != but
        )
        expected = open_[0][1:] if open_ else None
        assert placement.choose(allowed.__contains__, but) == expected
        if expected is not None:
            seats[expected[0]][2] += 1
            placement.took(expected[0])

"""The learning rate, counted in optimizer steps: first, end of warm-up, last, and the edges between."""

import pytest

from relax.megatron.optimizer import Schedule
from tests.megatron import tiny


def test_constant_without_warmup_is_the_rate_at_every_step():
    assert [Schedule(1e-3).at(step) for step in (0, 1, 10**6)] == [1e-3] * 3


def test_warmup_starts_above_zero_and_ends_at_the_rate():
    assert [Schedule(1.0, warmup=4).at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_rate_to_the_least_after_the_last_step():
    schedule = Schedule(1.0, min_lr=0.2, style="linear", decay=4)
    assert [schedule.at(step) for step in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle():
    schedule = Schedule(1.0, style="cosine", warmup=2, decay=6)
    assert schedule.at(1) == schedule.at(2) == 1.0
    assert schedule.at(4) == pytest.approx(0.5)
    assert schedule.at(6) == 0.0


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3, 9])
@pytest.mark.parametrize("decay", [1, 3])
def test_no_planned_step_has_rate_zero_and_no_length_of_a_phase_breaks(style, warmup, decay):
    schedule = Schedule(1.0, style=style, warmup=warmup, decay=decay)
    assert all(0 < schedule.at(step) <= 1.0 for step in range(decay))
    assert all(0 <= schedule.at(step) <= 1.0 for step in range(20))


def test_given_decay_steps_go_before_the_length_of_the_run():
    assert Schedule.from_options(tiny.options(lr_decay_style="linear", lr_decay_steps=10), 1.0, 100).decay == 10
    assert Schedule.from_options(tiny.options(lr_decay_style="linear"), 1.0, 100).decay == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "linear"}, "set --lr-decay-steps, or --num-rollout"),
        ({"style": "cosine", "decay": 0}, "it was given 0"),
        ({"style": "linear", "decay": 5, "min_lr": 2.0}, "--min-lr 2.0 must lie between 0 and the learning rate 1.0"),
        ({"style": "wsd", "decay": 5}, "choose constant, linear or cosine"),
    ],
)
def test_schedules_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(1.0, **changes)

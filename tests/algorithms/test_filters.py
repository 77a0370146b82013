"""The filter of groups: which are wanted, for which reason the others are not, and what a filter that fails says."""

import math
import subprocess
import sys

import numpy as np
import pytest

from relax.algorithms import filters, hooks
from relax.algorithms.filters import unwanted
from relax.algorithms.hooks import HookError
from relax.config.asynchrony import CONSTANT_FILTER
from relax.config.options import Options

REWARDS = np.array([1.0, 0.0, math.nan])
LENS = np.array([3, 0, 2], np.int32)
CUT = np.array([False, False, True])
ROW = {"prompt": "x", "level": 2}


def asked(path: str | None, rewards: np.ndarray = REWARDS) -> str | None:
    return unwanted(Options(dynamic_sampling_filter_path=path), rewards, LENS, CUT, ROW)


def here(function) -> str:
    return f"{__name__}:{function.__name__}"


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 1.0], None),
        ([0.0, 0.0, math.nan, 1e-9], None),
        ([1.0, 1.0], "constant_reward"),
        ([0.0, math.nan], "constant_reward"),
        ([math.nan, math.nan], "constant_reward"),
        ([3.0], "constant_reward"),
    ],
)
def test_the_built_in_filter_wants_two_different_rewards(rewards: list[float], reason: str | None) -> None:
    assert asked(CONSTANT_FILTER, np.array(rewards)) == reason


def test_without_a_filter_every_group_is_wanted() -> None:
    assert asked(None, np.zeros(3)) is None


def sees_everything(rewards, response_lens, truncated, row, options):
    assert np.array_equal(rewards, REWARDS, equal_nan=True) and response_lens.tolist() == [3, 0, 2]
    assert truncated.tolist() == [False, False, True] and row["level"] == 2 and options.seed == 1234
    return "level_2"


def test_a_filter_sees_the_group_and_names_its_reason() -> None:
    assert asked(here(sees_everything)) == "level_2"


def spoils(rewards, response_lens, truncated, **rest):
    rewards[:], response_lens[:], truncated[:] = 9, 9, True
    return np.bool_(True)


def test_a_filter_cannot_change_the_group() -> None:
    before = REWARDS.copy(), LENS.copy(), CUT.copy()
    assert asked(here(spoils)) is None
    for now, then in zip((REWARDS, LENS, CUT), before, strict=True):
        np.testing.assert_array_equal(now, then)


def never_(**rest):
    return False


def test_a_filter_without_a_reason_is_the_reason() -> None:
    assert asked(here(never_)) == "never"


def raises(row, **rest):
    return row["no_such_column"]


def nothing(**rest):
    return None


def two_words(**rest):
    return "too easy/../x"


def unbounded(**rest):
    return "x" * 65


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises, "raised KeyError: 'no_such_column'"),
        (nothing, "returned None; it must be True"),
        (two_words, "returned 'too easy/../x'"),
        (unbounded, "returned 'xxx"),
    ],
)
def test_a_filter_that_fails_is_named_with_what_it_did(function, told: str) -> None:
    with pytest.raises(HookError, match=f"--dynamic-sampling-filter-path {__name__}:{function.__name__}: {told}"):
        asked(here(function))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("relax.algorithms.filters:reward_not_constant", "but 'reward_is_not_constant'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("relax.functions:load", "cannot be called as load(rewards=..., response_lens=..., "),
    ],
)
def test_a_filter_that_cannot_be_called_is_refused_before_the_start(path: str, told: str) -> None:
    (found,) = hooks.check(Options(dynamic_sampling_filter_path=path), {"advantages"})
    assert found.option == "--dynamic-sampling-filter-path" and told in found.problem, found.problem
    assert hooks.check(Options(dynamic_sampling_filter_path=CONSTANT_FILTER), {"advantages"}) == []


def test_filters_import_no_torch() -> None:
    code = "import sys, relax.algorithms.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert CONSTANT_FILTER.partition(":")[0] == filters.__name__

"""Which options a resumed run must share."""

from typing import Any

import pytest
import yaml

from relax.config.options import Options
from relax.config.resolve import resolve
from relax.config.resume import ENDS, FREE, differences, fingerprint

BASE: dict[str, Any] = {"prompt_data": "p", "hf_checkpoint": "m", "num_rollout": 60, "lr": 1e-5}


def told(cut: int = 10, before: dict[str, Any] | None = None, **changed: Any) -> list[tuple[str, object, str, str]]:
    """What is said against going on with the changed options, from the config.yaml of the life before."""
    config = yaml.safe_load(resolve(BASE | (before or {}), None).config_yaml())
    options = Options(**{name: value for name, value in (BASE | (before or {}) | changed).items() if value is not None})
    return [(v.option, v.value, v.problem, v.fix) for v in differences(config, "config.yaml", options, cut)]


def test_the_same_options_go_on() -> None:
    assert told() == []
    assert told(before={"max_staleness": 2, "use_tis": True, "eps_clip": 0.1, "num_epoch": 3}) == []


def test_every_option_that_differs_is_named_with_both_values() -> None:
    found = told(lr=1e-4, rollout_batch_size=16, use_tis=True)
    assert [name for name, *_ in found] == [
        "--critic-lr",
        "--global-batch-size",
        "--lr",
        "--rollout-batch-size",
        "--use-tis",
    ]
    assert found[2] == ("--lr", 1e-4, "the run that is resumed has 1e-05 (config.yaml)", "Give --lr 1e-05.")


def test_an_option_that_was_not_set_is_to_be_left_out() -> None:
    assert told(eps_clip_c=3.0)[0][3] == "Leave --eps-clip-c out."


def test_where_a_run_is_how_it_is_watched_and_what_is_kept_may_differ() -> None:
    assert (
        told(log_level="debug", run_name="other", controller="ipc://elsewhere", peer_timeout=3.0, stall_timeout=9.0)
        == []
    )


def test_the_end_may_be_moved_further_only() -> None:
    assert told(num_rollout=61) == []
    assert told(before={"num_epoch": 3}, num_epoch=4) == []
    assert told(before={"num_epoch": 3}, num_epoch=None) == []
    (found,) = told(num_rollout=59)
    assert found[0] == "--num-rollout" and "has 60" in found[2] and found[3] == "Give --num-rollout 60 or more."
    (found,) = told(num_epoch=3)
    assert found[0] == "--num-epoch" and "has none" in found[2] and found[3] == "Leave --num-epoch out."


def test_a_finished_run_says_so() -> None:
    (found,) = told(cut=60)
    assert "is finished: batch 59 is trained" in found[2]
    assert told(cut=60, num_rollout=61) == []


def test_a_run_that_ended_well_goes_on_when_its_end_is_moved() -> None:
    for ends in ({"num_rollout": 60}, {"num_rollout": 60, "num_epoch": 2}, {"num_rollout": None, "num_epoch": 2}):
        before = yaml.safe_load(resolve(BASE | ends, None).config_yaml())

        def told(before: Any = before, **options: Any) -> list[str]:
            given = {name: value for name, value in (BASE | options).items() if value is not None}
            return [v.option for v in differences(before, "c", Options(**given), 10, ended=True)]

        assert told(**ends) == ["--num-rollout" if ends["num_rollout"] else "--num-epoch"]
        assert told(**{name: end and end + 1 for name, end in ends.items()}) == []


def test_a_schedule_that_would_move_with_the_end_is_refused_and_can_be_kept() -> None:
    before = {"lr_decay_style": "cosine"}
    assert told(before=before) == []
    (found,) = told(before=before, num_rollout=120)
    assert found[:2] == ("--lr-decay-steps", 120) and "has 60" in found[2]
    assert "give --lr-decay-steps 60" in found[3]
    assert told(before=before, num_rollout=120, lr_decay_steps=60) == []


def test_the_fingerprint_is_of_what_must_not_differ() -> None:
    one = fingerprint(Options(**BASE))
    assert one == fingerprint(Options(**BASE | {"num_rollout": 90, "log_level": "debug", "run_dir": "elsewhere"}))
    assert one != fingerprint(Options(**BASE | {"lr": 2e-5}))


@pytest.mark.parametrize("name", sorted(FREE | {*ENDS}))
def test_what_may_differ_is_an_option(name: str) -> None:
    assert name in Options.model_fields

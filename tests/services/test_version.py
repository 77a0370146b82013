"""When the trainer's version rises and when a version counts as published."""

import time
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, desk

from relax.services.errors import ServiceError


def in_training(tmp_path: Path, **options: Any) -> Desk:
    """Batches of one group; batch 0 is in training."""
    it = desk(tmp_path, rollout_batch_size=1, **options)
    it.turn()
    it.ready(it.orders()[0].lease)
    it.turn()
    it.started(0)
    return it


@pytest.mark.parametrize("first", ["actor", "critic"])
def test_the_version_rises_when_actor_and_critic_have_trained(tmp_path: Path, first: str) -> None:
    it = in_training(tmp_path, advantage_estimator="ppo")
    second = {"actor": "critic", "critic": "actor"}[first]
    it.trained(0, f"{first}-0")
    assert it.gate.version == 0 and len(it.book) == 1
    it.trained(0, f"{second}-0")
    assert it.gate.version == 1 and len(it.book) == 0


def test_a_version_is_published_when_v_has_risen_to_it(tmp_path: Path) -> None:
    """The actor publishes while the critic trains: slots and announcements wait."""
    it = in_training(tmp_path, advantage_estimator="ppo")
    it.trained(0)
    it.published(1)
    assert (it.gate.published_version, it.weights.newest and it.weights.newest.version) == (0, 0)
    assert it.gate.free_slots == 0
    it.trained(0, "critic-0")
    assert (it.gate.published_version, it.weights.newest and it.weights.newest.version) == (1, 1)
    assert it.gate.free_slots == 1
    it.turn()
    assert it.announced()[-1] == ("inproc://rollout-0", 1)


def test_without_a_critic_the_actor_alone_raises_the_version(tmp_path: Path) -> None:
    it = in_training(tmp_path)
    it.trained(0)
    it.published(1)
    assert it.gate.version == it.gate.published_version == 1


def test_nobody_else_reports_a_batch_as_trained(tmp_path: Path) -> None:
    it = in_training(tmp_path)
    with pytest.raises(ServiceError, match=r"reward-0 reports that it trained batch 0, but it is no trainer"):
        it.trained(0, "reward-0")


def test_a_row_waits_for_the_critic(tmp_path: Path) -> None:
    it = in_training(tmp_path, advantage_estimator="ppo")
    it.rows.report(0, "advantages", {})
    it.trained(0)
    it.rows.close_due()
    assert not (tmp_path / "metrics.jsonl").exists()
    it.trained(0, "critic-0")
    it.rows.close_due()
    assert "incomplete" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, set()),
        ({"advantage_estimator": "ppo"}, {"critic"}),
        ({"use_kl_loss": True, "ref_load": "ref"}, {"reference"}),
    ],
)
def test_a_run_waits_for_the_services_that_its_algorithm_needs(
    tmp_path: Path, options: dict[str, Any], needed: set[str]
) -> None:
    it = desk(tmp_path, **options)
    assert it.registry.missing(9.0, 0.0, 5.0) == []
    assert set(it.registry._needed) - {"rollout", "reward", "advantages", "actor"} == needed
    for role in needed:
        del it.registry.entries[f"{role}-0"]
    assert set(it.registry.missing(time.monotonic() + 9, time.monotonic(), 5.0)) == needed

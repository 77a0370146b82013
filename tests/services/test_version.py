"""When the trainer's version rises, and what the controller says of a prompt that it gives up."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from relax.config.options import Options
from relax.ledger.states import State
from relax.protocol.messages import Member, Published, Register, Rejected, Trained
from relax.services.controller import Controller
from relax.services.service import Context, ServiceError, shared_options
from relax.weights.manifest import Manifest, WeightTag, set_digest

REPORT = {"perf/response_tokens": ("sum", 5.0, 1.0)}


class FakeDraws:
    """The open draws, each of the same prompt."""

    def __init__(self, prompt: Any = None) -> None:
        self.prompt = prompt

    def __getitem__(self, group: int) -> Any:
        return SimpleNamespace(prompt=self.prompt)

    def ended(self, group: int) -> None:
        pass


def controller(tmp_path: Path, **options: Any) -> Controller:
    """A controller of batches of one group, whose group 0 is committed as batch 0 and in training."""
    chosen = Options(rollout_batch_size=1, n_samples_per_prompt=2, num_rollout=3, **options)
    run: Any = SimpleNamespace(run_id="r", metrics=tmp_path / "metrics.jsonl", ledger=tmp_path / "ledger.sqlite")
    it = Controller(Context("controller", chosen, run, "", "", None, chosen))
    it.draws = FakeDraws()  # type: ignore[assignment]
    it._turn = lambda: None  # type: ignore[method-assign]
    for role in it.registry._needed:
        member = Member(f"{role}-0", role, f"inproc://{role}", "1")
        it.registry.register(Register(member, "", 1, shared_options(chosen)), time.monotonic())
    asyncio.run(it.on_published(published(0), None))
    it.book.draw(0, 0, 0)
    lease = it.book.issue(0, "rollout-0", 0)
    it.gate.issue(0, 0)
    for state in (State.SAMPLED, State.SCORED, State.READY):
        it.book.advance(lease, state, oldest=0, tokens=5)
    it.gate.ready(0, 0)
    it.book.commit(0, it.gate.commit().groups)  # type: ignore[union-attr]
    it.book.started(0)
    it.gate.started(0)
    return it


def published(version: int) -> Published:
    tag = WeightTag("r", 0, version, version, set_digest(()), 0, 0.0)
    return Published(version, Manifest(tag, ()).to_json())


def trained(it: Controller, role: str) -> None:
    asyncio.run(it.on_trained(Trained(0, REPORT), SimpleNamespace(name=f"{role}-0")))


@pytest.mark.parametrize("first", ["actor", "critic"])
def test_the_version_rises_when_actor_and_critic_have_trained(tmp_path: Path, first: str) -> None:
    it = controller(tmp_path, advantage_estimator="ppo")
    second = {"actor": "critic", "critic": "actor"}[first]
    trained(it, first)
    assert it.gate.version == 0 and len(it.book) == 1
    trained(it, second)
    assert it.gate.version == 1 and len(it.book) == 0


def test_a_version_is_published_when_v_has_risen_to_it(tmp_path: Path) -> None:
    """The actor publishes while the critic trains: slots and announcements wait."""
    it = controller(tmp_path, advantage_estimator="ppo")
    trained(it, "actor")
    asyncio.run(it.on_published(published(1), None))
    assert (it.gate.published_version, it.weights and it.weights.version, it.gate.free_slots) == (0, 0, 0)
    trained(it, "critic")
    assert (it.gate.published_version, it.weights and it.weights.version, it.gate.free_slots) == (1, 1, 1)


def test_without_a_critic_the_actor_alone_raises_the_version(tmp_path: Path) -> None:
    it = controller(tmp_path)
    trained(it, "actor")
    asyncio.run(it.on_published(published(1), None))
    assert it.gate.version == it.gate.published_version == 1


def test_nobody_else_reports_a_batch_as_trained(tmp_path: Path) -> None:
    it = controller(tmp_path)
    with pytest.raises(ServiceError, match=r"reward-0 reports that it trained batch 0, but it is no trainer"):
        trained(it, "reward")


def test_a_row_waits_for_the_critic(tmp_path: Path) -> None:
    it = controller(tmp_path, advantage_estimator="ppo")
    it.rows.report(0, "advantages", {})
    trained(it, "actor")
    it.rows.close_due()
    assert not (tmp_path / "metrics.jsonl").exists()
    trained(it, "critic")
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
    it = controller(tmp_path, **options)
    assert it.registry.missing() == []
    assert set(it.registry._needed) - {"rollout", "reward", "advantages", "actor"} == needed
    for role in needed:
        del it.registry.entries[f"{role}-0"]
    assert set(it.registry.missing()) == needed


def test_a_prompt_that_is_set_aside_is_logged_with_what_the_users_code_raised(tmp_path: Path) -> None:
    it = controller(tmp_path)
    prompt = SimpleNamespace(prompt_id=17, epoch=0)
    it.draws = FakeDraws(prompt)  # type: ignore[assignment]
    it.book.draw(1, 17, 0)
    lease = it.book.issue(1, "rollout-0", 0)
    why = Rejected(lease, "reward", "reward_exception", "my:reward raised ValueError: no label\n  traceback")
    with capture_logs() as logs, pytest.raises(ServiceError, match="no label"):
        it._set_aside(lease, why)
    (told,) = [record for record in logs if record["event"] == "prompt_set_aside"]
    assert told["log_level"] == "error" and told["prompt_id"] == 17
    assert (told["stage"], told["reason"], told["error"]) == ("reward", "reward_exception", why.detail)

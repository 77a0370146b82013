"""Who is taken into a run under way, and who is not, with what to change."""

import pytest

from relax.protocol.messages import Member, Register
from relax.services.control.registry import RegistrationError, Registry

OPTIONS = {"seed": "7", "num_rollout": "12"}


def register(
    name: str, node: str = "left", endpoint: str = "tcp://10.0.0.1:5", life: str = "1", **options: str
) -> Register:
    return Register(Member(name, name.split("-")[0], endpoint, life), node, 1, OPTIONS | options)


@pytest.fixture
def run() -> Registry:
    it = Registry(OPTIONS)
    it.register(register("rollout-0"), 0.0)
    return it


def test_a_replica_of_another_node_joins(run: Registry) -> None:
    run.register(register("rollout-1", "right", "tcp://10.0.0.2:5"), 1.0)
    assert [entry.node for entry in run.of_role("rollout")] == ["left", "right"]


@pytest.mark.parametrize(
    ("who", "told"),
    [
        (register("rollout-1", num_rollout="13"), "num_rollout: 13 there, 12 in the run"),
        (
            register("rollout-0", "right", life="2"),
            "rollout-0 is on node left in this run, and this one is on node right",
        ),
        (register("rollout-0", "", life="2"), "and this one is on node -"),
        (register("rollout-1", "", "ipc:///tmp/relax-r/1.sock"), "not every host can reach both"),
    ],
    ids=["other options", "a name that is taken on another node", "the same, without a node", "another transport"],
)
def test_what_cannot_work_is_refused(run: Registry, who: Register, told: str) -> None:
    with pytest.raises(RegistrationError, match=told):
        run.register(who, 1.0)
    assert [entry.member.incarnation for entry in run.of_role("rollout")] == ["1"]


def test_a_service_moves_to_another_node_when_its_life_there_has_ended(run: Registry) -> None:
    run.remove(run.entries["rollout-0"].member, 1.0, died=True)
    run.register(register("rollout-0", "right", life="2"), 2.0)
    assert run.entries["rollout-0"].node == "right"

"""Topology files: what they mean, and a line number for everything that is wrong in them."""

from pathlib import Path
from textwrap import dedent

import pytest

from relax.config.options import Options
from relax.config.topology import Topology, read_topology
from relax.config.violation import ConfigError, Violation

SERVICES = """
services:
  controller: {}
  rollout: {}
  reward: {}
  advantages: {}
  actor: {}
"""


def read(tmp_path: Path, text: str) -> tuple[Topology, list[Violation]]:
    file = tmp_path / "t.yaml"
    file.write_text(dedent(text))
    return read_topology(file)


def refusals(tmp_path: Path, text: str) -> list[str]:
    return [str(violation).replace(str(tmp_path) + "/", "") for violation in read(tmp_path, text)[1]]


def test_services_become_named_processes(tmp_path: Path) -> None:
    topology, found = read(
        tmp_path,
        """
        run: {name: demo, directory: out}
        services:
          controller:
          rollout: {replicas: 2, cores: [0, 1], threads: 2}
          reward: {replicas: 2}
          advantages: {}
          actor: {ranks: 4, tensor_parallel_size: 2, devices: [0, 1, 2, 3]}
        options: {rollout-batch-size: 8, lr: 1e-5}
        """,
    )
    assert not found and topology.run_name == "demo" and topology.directory == Path("out")
    names = [service.name for service in topology.services]
    assert names == ["controller", "rollout-0", "rollout-1", "reward-0", "reward-1", "advantages", "actor"]
    assert [service.cores for service in topology.role("rollout")] == [(0,), (1,)]
    actor = topology.service("actor")
    assert actor is not None and actor.ranks == 4 and actor.devices == (0, 1, 2, 3)
    assert {name: value for name, (value, _) in topology.options.items()} == {
        "tensor_parallel_size": 2,
        "rollout_batch_size": 8,
        "lr": "1e-5",
    }
    assert topology.options["rollout_batch_size"][1].endswith("t.yaml:9")
    assert topology.options["tensor_parallel_size"][1].endswith("t.yaml:8")


def test_one_role_on_several_nodes(tmp_path: Path) -> None:
    topology, found = read(
        tmp_path,
        """
        controller: tcp://10.0.0.1:5755
        nodes: {a: {address: 10.0.0.1}, b: {address: 10.0.0.2}}
        services:
          controller: {node: a}
          rollout:
            - {node: a, replicas: 1}
            - {node: b, replicas: 2}
          reward: {node: a}
          advantages: {node: a}
          actor: {node: b}
        """,
    )
    assert not found and topology.spans_hosts
    assert [(s.name, s.node) for s in topology.role("rollout")] == [
        ("rollout-0", "a"),
        ("rollout-1", "b"),
        ("rollout-2", "b"),
    ]
    assert [service.name for service in topology.on("b")] == ["rollout-1", "rollout-2", "actor"]
    assert topology.address(topology.services[0]) == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SERVICES + "  rolloutt: {}\n", ["services.rolloutt", "t.yaml:8", "is no service", "Did you mean rollout?"]),
        (SERVICES.replace("actor", "aktor"), ["services.aktor", "t.yaml:7", "Did you mean actor?"]),
        (SERVICES + "  critic: {rank: 2}\n", ["services.critic.rank", "t.yaml:8", "Did you mean ranks?"]),
        (SERVICES + "  reference: [{}, {}]\n", ["services.reference.1", "more than one entry"]),
        (SERVICES.replace("  actor: {}\n", ""), ["actor is missing", "Add `actor: {}`"]),
        (SERVICES.replace("rollout: {}", "rollout: {replicsa: 2}"), ["t.yaml:4", "Did you mean replicas?"]),
        (SERVICES.replace("rollout: {}", "rollout: {replicas: 0}"), ["replicas = 0", "t.yaml:4", "at least 1"]),
        (SERVICES.replace("rollout: {}", "rollout: {engine: vlm}"), ["engine = 'vlm'", "vllm, simulated"]),
        (SERVICES.replace("rollout: {}", "rollout: {cores: [0, 1, 2], replicas: 2}"), ["3 cores", "2 replicas"]),
        (SERVICES.replace("actor: {}", "actor: [{}, {}]"), ["services.actor.1", "more than one entry"]),
        (SERVICES.replace("actor: {}", "actor: {node: left}"), ["node = 'left'", "is no node of this file"]),
        (SERVICES.replace("actor: {}", "actor: 3"), ["services.actor = 3", "is no mapping"]),
        (SERVICES + "option: {lr: 1}\n", ["option", "t.yaml:8", "Did you mean options?"]),
        (SERVICES + "run: {name: a/b}\n", ["run.name = 'a/b'", "t.yaml:8"]),
        (SERVICES + "controller: tcp://host\n", ["controller = 'tcp://host'", "tcp://<host>:<port>"]),
        (SERVICES + "controller: tcp://host:0\n", ["is no endpoint"]),
        (SERVICES + "options: {lr: 1, lr: 2}\n", ["stands twice", "t.yaml:8"]),
    ],
)
def test_a_fault_is_named_with_its_line_and_its_remedy(tmp_path: Path, text: str, told: list[str]) -> None:
    try:
        found = refusals(tmp_path, text)
    except ConfigError as error:
        found = [str(violation).replace(str(tmp_path) + "/", "") for violation in error.violations]
    assert len(found) == 1, found
    for words in told:
        assert words in found[0], found[0]


def test_the_parallel_sizes_of_the_actor_are_options_and_those_of_others_their_own(tmp_path: Path) -> None:
    text = SERVICES.replace("actor: {}", "actor: {tensor_parallel_size: 2}") + "  critic: {pipeline_parallel_size: 2}\n"
    topology, found = read(tmp_path, text + "  reference: {tensor_parallel_size: 1}\n")
    assert not found and {name: value for name, (value, _) in topology.options.items()} == {"tensor_parallel_size": 2}
    options = Options(tensor_parallel_size=2)
    sizes = {}
    for role in ("actor", "critic", "reference"):
        (service,) = topology.role(role)
        own = service.options(options)
        sizes[role] = (own.tensor_parallel_size, own.pipeline_parallel_size)
    assert sizes == {"actor": (2, 1), "critic": (2, 2), "reference": (1, 1)}


def test_an_option_given_in_two_places_is_refused(tmp_path: Path) -> None:
    text = SERVICES.replace("actor: {}", "actor: {tensor_parallel_size: 2}") + "options: {tensor_parallel_size: 4}\n"
    (told,) = refusals(tmp_path, text)
    assert "also stands at t.yaml:7 as 2" in told
    text = SERVICES + "options: {global_batch_size: 4, global-batch-size: 4}\n"
    assert "also stands at t.yaml:8" in refusals(tmp_path, text)[0]


@pytest.mark.parametrize(
    ("controller", "told"),
    [("", "Add `controller: tcp://"), ("controller: tcp://127.0.0.1:5755\n", "reachable on its own host only")],
)
def test_several_hosts_need_a_controller_that_all_can_reach(tmp_path: Path, controller: str, told: str) -> None:
    nodes = "nodes: {a: {address: h1}, b: {address: h2}}\n"
    services = "".join(
        line.replace("{}", "{node: b}" if "rollout" in line else "{node: a}") + "\n" for line in SERVICES.splitlines()
    )
    (found,) = refusals(tmp_path, controller + nodes + services)
    assert told in found


def test_every_node_of_several_needs_an_address_and_every_service_a_node(tmp_path: Path) -> None:
    text = "controller: tcp://h1:5755\nnodes: {a: {address: h1}, b: {}}\n" + SERVICES
    text = text.replace("controller: {}", "controller: {node: a}").replace("rollout: {}", "rollout: {node: b}")
    found = refusals(tmp_path, text)
    assert any("nodes.b" in told and "has no address" in told for told in found)
    assert sum("names no node" in told for told in found) == 3


@pytest.mark.parametrize(
    ("text", "told"), [("services: [", "is no YAML on line"), ("- a\n", "holds no mapping"), ("", "holds no mapping")]
)
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, text)


def test_a_missing_file_is_refused_with_the_working_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Relative paths start at"):
        read_topology(tmp_path / "none.yaml")


def test_merge_keys_and_anchors_keep_their_lines(tmp_path: Path) -> None:
    text = "x: &base {replicas: 2, cores: [0]}\n" + SERVICES.replace("rollout: {}", "rollout: {<<: *base}")
    found = refusals(tmp_path, text)
    assert any("1 cores" in told for told in found) and any("t.yaml:1" in told and "x" in told for told in found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\n? [a, b]\n: 1\n", "on line 2: a key is a list or a mapping"),
        ("a: 1\n? {a: b}\n: 1\n", "on line 2: a key is a list or a mapping"),
        ("a: 1\nb: &x [*x]\n", "on line 2: an alias stands inside what it is an alias of"),
        ("a: 1\nb: &x {c: {d: *x}}\n", "on line 2: an alias stands inside what it is an alias of"),
        ("a: 1\nb: &x {<<: *x}\n", "on line 2: an alias stands inside what it is an alias of"),
        ("a: 1\nb: \0\n", "on line 2: it holds the character '\\x00'"),
        ("a: 1\nb: " + "[" * 5000, "is nested too deeply by line 2"),
        ("a: 1\nb: 2024-13-45\n", "on line 2: '2024-13-45' is no timestamp"),
        ("a: 1\nb: !!bool x\n", "on line 2: 'x' is no bool"),
        ("a: 1\nb: " + "9" * 5000, "9' is no int"),
    ],
)
def test_yaml_that_python_cannot_hold_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    (violation,) = refused.value.violations
    assert str(tmp_path / "t.yaml") in str(violation) and told in violation.problem and violation.fix


def test_an_alias_beside_what_it_stands_for_is_read(tmp_path: Path) -> None:
    _, found = read(
        tmp_path, SERVICES.replace("reward: {}", "reward: &one {threads: 2}").replace("actor: {}", "actor: *one")
    )
    assert not found


@pytest.mark.parametrize(
    ("name", "told"), [("../../x", "is no name. A name has letters, digits, dots, dashes"), ("x" * 65, "is too long")]
)
def test_a_name_that_cannot_name_a_directory(tmp_path: Path, name: str, told: str) -> None:
    (found,) = refusals(tmp_path, f"run: {{name: {name}}}{SERVICES}")
    assert found.startswith(f"run.name = {name!r} (from t.yaml:1)") and told in found

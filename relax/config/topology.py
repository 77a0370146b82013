"""The topology file: which services a run has, where each of them runs, and the options they share.

run: {name: demo, directory: runs}
controller: tcp://10.0.0.1:5555       # only when several hosts take part
nodes: {left: {address: 10.0.0.1}, right: {address: 10.0.0.2}}
services:
  controller: {node: left}
  rollout:                            # one entry, or a list of them for several nodes
    - {node: left, replicas: 1, cores: [0]}
    - {node: right, replicas: 2, cores: [0, 1]}
  reward: {node: left}
  advantages: {node: left}
  actor: {node: right, ranks: 2, tensor_parallel_size: 2}
options: {hf_checkpoint: models/tiny, rollout_batch_size: 8}
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relax.config.located import Located, Where, read_yaml
from relax.config.options import Options
from relax.config.refusals import NAME_FIX, explain, hint, nearest
from relax.config.schema import (
    ENDPOINT,
    PARALLEL,
    REQUIRED,
    ROLES,
    RUN_NAME,
    TOP_LEVEL,
    ActorEntry,
    Entry,
    NodeEntry,
    RankedEntry,
    ReplicatedEntry,
    RolloutEntry,
    RunEntry,
    ServiceEntry,
)
from relax.config.violation import Violation


@dataclass(frozen=True, slots=True)
class Service:
    """One process to start: a replica of a role. `ranks` None means what the parallel sizes need; `sizes` are those
    that differ from the options'."""

    name: str
    role: str
    index: int
    node: str | None
    cores: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    threads: int = 1
    engine: str | None = None
    ranks: int | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def options(self, options: Options) -> Options:
        """The options of the run with this service's own parallel sizes."""
        return options.model_copy(update=dict(self.sizes)) if self.sizes else options


@dataclass(frozen=True, slots=True)
class Topology:
    """A checked topology file. `options` maps option names to (value, source)."""

    path: Path
    text: str
    run_name: str | None
    directory: Path
    controller: str | None
    nodes: dict[str, str]
    services: tuple[Service, ...]
    options: dict[str, tuple[Any, str]]

    def on(self, node: str | None) -> tuple[Service, ...]:
        """The services of one node; all of them for None."""
        return tuple(service for service in self.services if node is None or service.node == node)

    def has_controller(self, node: str | None) -> bool:
        """Whether the controller is on this node, so that a run is opened there and joined on any other."""
        return any(service.role == "controller" for service in self.on(node))

    def role(self, role: str) -> tuple[Service, ...]:
        return tuple(service for service in self.services if service.role == role)

    def service(self, name: str) -> Service | None:
        return next((service for service in self.services if service.name == name), None)

    @property
    def spans_hosts(self) -> bool:
        return len({service.node for service in self.services}) > 1

    def address(self, service: Service) -> str | None:
        """The address of the service's node, None on a topology of one host."""
        return self.nodes.get(service.node or "") or None


def read_topology(path: Path) -> tuple[Topology, list[Violation]]:
    """Reads and checks a topology file against its schema.

    Returns what could be understood and every violation found, so that one refusal names them all. Raises ConfigError
    only when nothing can be understood: no such file, no YAML.
    """
    document = read_yaml(path)
    reader = _Reader(document)
    topology = reader.topology(path)
    return topology, reader.violations


class _Reader:
    def __init__(self, document: Located) -> None:
        self.document = document
        self.violations: list[Violation] = []

    def topology(self, path: Path) -> Topology:
        data = self.document.data
        for key in data:
            if key not in TOP_LEVEL:
                self.refuse((key,), data[key], "is no part of a topology file", _hint(key, TOP_LEVEL))
        run = self.entry(RunEntry, self.mapping(("run",)), ("run",)) or RunEntry()
        nodes = {
            str(name): (self.entry(NodeEntry, entry, ("nodes", name)) or NodeEntry()).address
            for name, entry in self.mapping(("nodes",)).items()
        }
        services, options = self.services(nodes)
        topology = Topology(
            path=path,
            text=path.read_text(encoding="utf-8"),
            run_name=run.name,
            directory=run.directory,
            controller=self.controller(),
            nodes=nodes,
            services=tuple(services),
            options={**options, **self.options(options)},
        )
        for name in nodes:
            if not re.fullmatch(RUN_NAME, name):
                self.refuse(("nodes", name), name, "is no name", NAME_FIX)
        self.check_hosts(topology)
        return topology

    def controller(self) -> str | None:
        value = self.document.data.get("controller")
        if value is None:
            return None
        match = ENDPOINT.fullmatch(value) if isinstance(value, str) else None
        if match is None or not 0 < int(match[2]) < 65536:
            self.refuse(("controller",), value, "is no endpoint", "Write tcp://<host>:<port>, with a fixed port.")
            return None
        return str(value)

    def services(self, nodes: dict[str, str]) -> tuple[list[Service], dict[str, tuple[Any, str]]]:
        given = self.mapping(("services",))
        services: list[Service] = []
        options: dict[str, tuple[Any, str]] = {}
        for role, entries in given.items():
            where: Where = ("services", role)
            if role not in ROLES:
                self.refuse(where, entries, "is no service", _hint(role, tuple(ROLES)))
                continue
            several = isinstance(entries, list)
            for index, entry in enumerate(entries if several else [entries]):
                place = (*where, index) if several else where
                checked = self.entry(ROLES[role], {} if entry is None else entry, place)
                if checked is None:
                    continue
                if checked.node is not None and checked.node not in nodes:
                    listing = f"The nodes are {', '.join(nodes)}." if nodes else "List the nodes under `nodes:`."
                    self.refuse(
                        (*place, "node"), checked.node, "is no node of this file", _hint(checked.node, nodes, listing)
                    )
                start = sum(service.role == role for service in services)
                services += self.replicas(role, checked, place, start)
                if role == "actor":
                    options |= {
                        name: (size, self.document.source((*place, name))) for name, size in _sizes(checked).items()
                    }
        misspelt = {nearest(str(role), ROLES) for role in given if role not in ROLES}
        for role in REQUIRED:
            if role not in given and role not in misspelt:
                self.refuse(("services",), sorted(map(str, given)), f"{role} is missing", f"Add `{role}: {{}}`.")
        return services, options

    def replicas(self, role: str, entry: ServiceEntry, where: Where, start: int) -> Iterator[Service]:
        replicas = entry.replicas if isinstance(entry, ReplicatedEntry) else 1
        if start and not isinstance(entry, ReplicatedEntry):
            self.refuse(where, role, "has more than one entry", "This service runs once; keep one entry.")
        shares = {}
        for key in ("cores", "devices"):
            items: Sequence[int] = getattr(entry, key)
            if len(items) % replicas:
                problem = f"{len(items)} {key} cannot be dealt out evenly between {replicas} replicas"
                self.refuse((*where, key), list(items), problem, f"List a multiple of {replicas}.")
            shares[key] = len(items) // replicas
        for index in range(replicas):
            yield Service(
                name=f"{role}-{start + index}" if "replicas" in ROLES[role].model_fields else role,
                role=role,
                index=start + index,
                node=entry.node,
                cores=tuple(entry.cores[index * shares["cores"] :][: shares["cores"]]),
                devices=tuple(entry.devices[index * shares["devices"] :][: shares["devices"]]),
                threads=entry.threads,
                engine=entry.engine if isinstance(entry, RolloutEntry | ActorEntry) else None,
                ranks=entry.ranks if isinstance(entry, RankedEntry) else None,
                sizes={} if role == "actor" else _sizes(entry),
                source=self.document.source(where),
            )

    def options(self, from_services: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
        options: dict[str, tuple[Any, str]] = {}
        for key, value in self.mapping(("options",)).items():
            name, source = str(key).replace("-", "_"), self.document.source(("options", key))
            earlier = options.get(name) or from_services.get(name)
            if earlier is not None and (name in options or earlier[0] != value):
                self.refuse(("options", key), value, f"also stands at {earlier[1]} as {earlier[0]!r}", "Keep one.")
            options[name] = (value, source)
        return options

    def check_hosts(self, topology: Topology) -> None:
        unknown = [service for service in topology.services if service.node and service.node not in topology.nodes]
        if unknown or not topology.spans_hosts:
            return
        for service in topology.services:
            if service.node is None:
                where: Where = ("services", service.role)
                self.refuse(where, service.name, "names no node, but others do", "Give every service a node.")
            elif service.node in topology.nodes and not topology.nodes[service.node]:
                self.refuse(("nodes", service.node), "", "has no address", "Add `address:`, as other nodes reach it.")
        if "controller" not in self.document.data:
            problem = "is missing, and the services are on several nodes"
            self.refuse(("controller",), None, problem, "Add `controller: tcp://<address of its node>:<port>`.")
        elif topology.controller and re.search(r"//(localhost|127\.|\[::1\])", topology.controller):
            problem = "is reachable on its own host only, and the services are on several nodes"
            self.refuse(("controller",), topology.controller, problem, "Name the address of the controller's node.")

    def mapping(self, where: Where) -> dict[Any, Any]:
        value = self.document.data.get(where[0])
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(where, value, "is no mapping", "See topologies/local.yaml for an example.")
            return {}
        return value

    def entry(self, model: type[Entry], data: Any, where: Where) -> Any:
        if not isinstance(data, dict):
            self.refuse(where, data, "is no mapping", f"Give {', '.join(model.model_fields)} as keys.")
            return None
        try:
            return model.model_validate(data)
        except ValidationError as failed:
            for error in failed.errors():
                place: Where = (*where, *error["loc"])
                key = str(error["loc"][0])
                if error["type"] == "extra_forbidden":
                    problem, fix = f"{where[-1]} has no such key", _hint(key, tuple(model.model_fields))
                else:
                    problem, fix = explain(error, model.model_fields.get(key))
                self.refuse(place, error["input"], problem, fix)
            return None

    def refuse(self, where: Where, value: object, problem: str, fix: str) -> None:
        name = ".".join(map(str, where))
        self.violations.append(Violation(name, value, problem, fix, self.document.source(where)))


def _sizes(entry: ServiceEntry) -> dict[str, Any]:
    """The parallel sizes that stand in an entry."""
    if not isinstance(entry, RankedEntry):
        return {}
    return {name: size for name in PARALLEL if (size := getattr(entry, name)) is not None}


def _hint(name: object, known: Sequence[str] | dict[str, str], listing: str = "") -> str:
    return hint(str(name), known, listing or f"There are {', '.join(known)}.")

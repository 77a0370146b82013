"""Which processes a run has on this host: the services of the topology as commands, environments and cores."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.config.checks import model_ranks
from relax.config.fields import flag
from relax.config.options import SECTIONS, Options
from relax.config.resolve import Resolved, shown
from relax.config.schema import RANKED
from relax.config.simulated import SIMULATED
from relax.config.topology import Service
from relax.launch.rundir import RunDir
from relax.launch.sweep import MARK

# What the launcher has acted on: the services find the run, and what it goes on from, in its directory.
OF_LAUNCH = frozenset({"run_dir", "resume"})


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One child of the launcher."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


# (service, topology file, run directory, option flags) -> command line
Command = Callable[[Service, Path, Path, Sequence[str]], Sequence[str]]


def service_command(service: Service, topology: Path, run_dir: Path, flags: Sequence[str]) -> list[str]:
    """How a service is started; `bin/relax-service` runs the same module."""
    start = [sys.executable, "-m", "relax.services.cli", service.role]
    return [*start, "--topology", str(topology), "--name", service.name, "--run-dir", str(run_dir), *flags]


def plan(
    resolved: Resolved, run: RunDir, node: str | None, flags: Mapping[str, Any], command: Command = service_command
) -> list[ProcessPlan]:
    """The processes of `node` (all for None), the controller first. `flags` are the user's own, by option name."""
    assert resolved.topology is not None
    passed = flag_words({name: value for name, value in flags.items() if name not in OF_LAUNCH})
    services = sorted(resolved.topology.on(node), key=lambda service: service.role != "controller")
    return [
        ProcessPlan(
            name=service.name,
            role=service.role,
            command=tuple(command(service, run.topology_of(node), run.path, passed)),
            environment=environment(mark_of(run, node)),
        )
        for service in services
    ]


def mark_of(run: RunDir, node: str | None) -> str:
    """What the processes that one launcher starts carry in their environment. Two launchers of one run on one host
    (nodes that share it) must not end each other's, nor may what clears up after a dead launcher end the run's next
    life."""
    life = f"{run.run_id}-{run.lineage}" if run.lineage else run.run_id
    return f"{life}.{node}" if node else life


def environment(mark: str) -> dict[str, str]:
    """What a service finds in its environment beyond the launcher's own; cores, threads and devices it sets itself."""
    return {MARK: mark, "PYTHONUNBUFFERED": "1"}


def flag_words(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line: `{"lr": "1e-5", "use_tis": False}` -> `["--lr=1e-5", "--no-use-tis"]`."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag("no_" + name))
        else:
            words.append(f"{flag(name)}={value}")
    return words


def describe(resolved: Resolved, node: str | None) -> str:
    """What --dry-run prints: every option with its source, then the processes and where they run."""
    assert resolved.topology is not None
    options = resolved.options
    lines = []
    width = max(len(name) for section in SECTIONS for name in shown(section)) + 2
    for section in SECTIONS:
        names = shown(section)
        if names:
            lines += ["", section.__doc__ or ""]
        for name in names:
            lines.append(f"  {flag(name):<{width}} {_text(options, name):<28} {resolved.sources[name]}")
    lines += ["", f"Processes{f' of node {node}' if node else ''}"]
    for service in resolved.topology.on(node):
        lines.append(f"  {service.name:<16} {'  '.join(_facts(resolved, service))}")
    lines += ["", f"Effective bounds: {bounds(resolved)}"]
    return "\n".join(lines).lstrip("\n")


def _text(options: Options, name: str) -> str:
    value = getattr(options, name)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _facts(resolved: Resolved, service: Service) -> list[str]:
    facts = [f"node {service.node}"] if service.node else []
    if service.engine:
        facts.append(f"engine {service.engine}")
    if service.role in RANKED and service.engine != SIMULATED:
        ranks = service.ranks or model_ranks(service.options(resolved.options))
        facts.append(f"{ranks} rank{'s' if ranks > 1 else ''}")
    if service.cores:
        facts.append(f"cores {','.join(map(str, service.cores))}")
    if service.devices:
        facts.append(f"devices {','.join(map(str, service.devices))}")
    return [*facts, f"{service.threads} thread{'s' if service.threads > 1 else ''}", f"({service.source})"]


def bounds(resolved: Resolved) -> str:
    """How far rollout may run ahead of training here, and which of the limits is the one that it meets."""
    options, topology = resolved.options, resolved.topology
    assert topology is not None
    lead, credit = options.rollout_lead, options.rollout_credit * len(topology.role("rollout"))
    if options.max_staleness == 0:
        groups = options.over_sampling_batch_size or options.rollout_batch_size
        return f"lockstep; {_groups(groups, options)} of the version in training are sampled for each batch"
    slots = (lead + 1) * options.rollout_batch_size
    ahead = f"{lead} {'batch' if lead == 1 else 'batches'} ahead"
    text = (
        f"asynchronous; staleness at most {options.max_staleness}, rollout at most {ahead}: "
        f"{_groups(slots, options)} in flight"
    )
    if credit < slots:
        text += f", of which the replicas sample {credit} at once (--rollout-credit)"
    return text


def _groups(count: int, options: Options) -> str:
    return f"{count} groups ({count * options.n_samples_per_prompt} samples)"

"""From a command line and a topology file to the options of a run, each with where it came from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from relax.config.fields import accepts, extra, flag, is_optional, is_switch
from relax.config.flags import FOREIGN, Given
from relax.config.options import DERIVED, SECTIONS, Options
from relax.config.refusals import explain, nearest
from relax.config.topology import Topology, read_topology
from relax.config.violation import ConfigError, Violation


@dataclass(frozen=True, slots=True)
class Resolved:
    """The options of a run, where each came from (`flag`, `topologies/local.yaml:12`, `derived`, `default`), and the
    topology. `violations` are those found so far; options in `suspects` hold a stand-in because theirs was refused,
    so what follows from them must not be reported."""

    options: Options
    sources: Mapping[str, str]
    topology: Topology | None
    violations: tuple[Violation, ...] = ()
    suspects: frozenset[str] = field(default_factory=frozenset)

    def config_yaml(self) -> str:
        """The text of config.yaml: every option that is available, by section, with its source as a comment."""
        values = self.options.model_dump(mode="json")
        lines = []
        for section in SECTIONS:
            names = shown(section)
            if names:
                lines.append(f"# {section.__doc__}")
            for name in names:
                text = yaml.safe_dump({name: values[name]}, width=10**6, allow_unicode=True).rstrip("\n")
                lines.append(f"{text}  # {self.sources[name]}")
        return "\n".join(lines) + "\n"

    @property
    def topology_text(self) -> str:
        return self.topology.text if self.topology else ""


def shown(section: type) -> list[str]:
    """The available options of a section; one that is not built yet has no value worth showing."""
    names = [name for name in section.__annotations__ if name in Options.model_fields]
    return [name for name in names if not extra(Options.model_fields[name]).unavailable]


def load(given: Given, topology_path: Path | None, *, machine: bool = False) -> Resolved:
    """Resolves a command line and a topology file, and checks the options against each other.

    `machine` also checks what they need on this machine (checkpoint, prompts, reward, shared memory), as the launcher
    does for the processes it starts. Raises ConfigError with every violation.
    """
    from relax.config.checks import check_options
    from relax.config.machine import check_machine

    resolved = resolve(given.options, topology_path, given.violations, given.suspects)
    return accepted(resolved, check_options, *([check_machine] if machine else []))


def accepted(resolved: Resolved, *checks: Any) -> Resolved:
    """`resolved`, when it and every check find nothing wrong. Raises ConfigError with all violations otherwise."""
    found = [*resolved.violations]
    for check in checks:
        found += check(resolved)
    if found:
        raise ConfigError(found)
    return resolved


def resolve(
    flags: Mapping[str, Any],
    topology_path: Path | None,
    violations: Sequence[Violation] = (),
    suspects: frozenset[str] = frozenset(),
) -> Resolved:
    """Merges flags over the topology file's options over defaults and checks types and ranges.

    Never stops at the first fault: faults are in the result. Raises ConfigError only when the topology file cannot be
    understood at all.
    """
    found = list(violations)
    topology = None
    if topology_path is not None:
        try:
            topology, refused = read_topology(topology_path)
        except ConfigError as error:
            raise ConfigError([*found, *error.violations]) from None
        found += refused
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    doubted = set(suspects)
    if topology is not None:
        if topology.run_name is not None:
            values["run_name"], sources["run_name"] = topology.run_name, f"{topology.path}, run.name"
        for name, (value, source) in topology.options.items():
            if name in Options.model_fields:
                values[name], sources[name] = value, source
                continue
            match = nearest(name, [known.replace("_", "-") for known in Options.model_fields])
            doubted |= {match.replace("-", "_")} if match else set()
            fix = FOREIGN.get(flag(name)) or (f"Did you mean {match}?" if match else "See relax-launch --help.")
            found.append(Violation(f"options.{name}", value, "is no option", fix, source))
    values |= flags
    sources |= dict.fromkeys(flags, "flag")

    options, refused = _validate(values, sources, doubted)
    found += refused
    doubted |= {violation.option[2:].replace("-", "_") for violation in refused}
    for name in Options.model_fields:
        sources.setdefault(name, "derived" if name in DERIVED and getattr(options, name) is not None else "default")
    return Resolved(options, sources, topology, tuple(found), frozenset(doubted))


def _validate(values: dict[str, Any], sources: Mapping[str, str], doubted: set[str]) -> tuple[Options, list[Violation]]:
    """Options with every refused value left out, and the refusals."""
    kept: dict[str, Any] = {}
    refused: dict[str, Violation] = {}

    def refuse(name: str, value: object, problem: str, fix: str) -> None:
        refused[name] = Violation(flag(name), value, problem, fix, sources.get(name, ""))
        kept.pop(name, None)

    for name, value in values.items():
        info = Options.model_fields[name]
        if isinstance(value, str) and value.lower() in ("none", "null") and is_optional(info):
            value = None
        kept[name] = value
        if isinstance(value, bool) and not is_switch(info):
            # pydantic would read true as 1.
            refuse(name, value, "is a switch's value", "Give a number or text.")
        elif isinstance(value, int | float) and (accepts(info, str) or accepts(info, Path)):
            # YAML reads `run_name: 7` as a number.
            kept[name] = str(value)
    while True:
        try:
            options = Options(**kept)
            break
        except ValidationError as failed:
            before = len(kept)
            for error in failed.errors():
                name = str(error["loc"][0])
                if name in kept:
                    refuse(name, error["input"], *explain(error, Options.model_fields.get(name)))
            if len(kept) == before:
                raise
    for name, value in kept.items():
        about = extra(Options.model_fields[name])
        if about.unavailable and getattr(options, name) != Options.model_fields[name].default and value is not None:
            refused[name] = Violation(flag(name), value, "is not available yet", about.unavailable, sources[name])
    for name, field_ in Options.model_fields.items():
        if extra(field_).required and not getattr(options, name) and name not in refused and name not in doubted:
            refused[name] = Violation(
                flag(name), "", "is required", f"Give {flag(name)}: {field_.description}.", sources.get(name, "")
            )
    return options, list(refused.values())

"""Whether a run may be started here: every check of the launcher, before it touches anything."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from relax.config.checks import check_options, located
from relax.config.flags import Given
from relax.config.machine import check_machine
from relax.config.resolve import Resolved, accepted, resolve
from relax.config.simulated import is_simulated
from relax.config.violation import ConfigError, Violation
from relax.launch.fit import unfit
from relax.launch.load import Origin, find_origin
from relax.launch.resume import OPTION, Resumption, find, misfits, named, restart_acts
from relax.launch.rundir import directory_refusals, refusals


@dataclass(frozen=True, slots=True)
class Accepted:
    """A run that may be started: its options, and as the user gave them, where a --load that named a run names its
    checkpoint; what it goes on with and what it begins with, None where neither is looked at on this host."""

    resolved: Resolved
    given: Given
    resumption: Resumption | None
    origin: Origin | None

    @property
    def node(self) -> str | None:
        node: str | None = self.given.own.node
        return node

    def begins(self) -> Iterator[str]:
        """What this life begins with, unless it is --hf-checkpoint; in lines."""
        if self.resumption is not None:
            options = self.resolved.options
            without = [
                flag
                for flag, on in (("--no-load-optim", options.no_load_optim), ("--no-load-rng", options.no_load_rng))
                if on
            ]
            yield f"resume: {self.resumption}{''.join(f', {flag}' for flag in without)}"
        if self.origin is not None:
            yield f"load: {self.origin}"


def accept(given: Given) -> Accepted:
    """Raises ConfigError with every reason why the run cannot be started."""
    resolved = resolve(given.options, given.own.topology, given.violations, given.suspects)
    beginning = _Beginning(given.own.node)
    node = given.own.node
    accepted(resolved, check_options, beginning.node_is_one, beginning.can_be_opened, lambda r: check_machine(r, node))
    if (origin := beginning.origin) is not None:
        pinned = {"load": str(origin.checkpoint.path)}
        given = replace(given, options=given.options | pinned)
        resolved = replace(resolved, options=resolved.options.model_copy(update={"load": origin.checkpoint.path}))
    return Accepted(resolved, given, beginning.resumption, origin)


class _Beginning:
    """The checks of where a life begins, and what they found."""

    def __init__(self, node: str | None) -> None:
        self.node = node
        self.resumption: Resumption | None = None
        self.origin: Origin | None = None

    def node_is_one(self, resolved: Resolved) -> list[Violation]:
        assert resolved.topology is not None
        node, nodes = self.node, resolved.topology.nodes
        if node is None or (node in nodes and resolved.topology.on(node)):
            return []
        problem = "has no service in the topology" if node in nodes else "is no node of the topology"
        return [
            Violation("--node", node, problem, f"There are {', '.join(nodes) or 'no nodes; leave it out'}.", "flag")
        ]

    def can_be_opened(self, resolved: Resolved) -> list[Violation]:
        assert resolved.topology is not None
        options, topology = resolved.options, resolved.topology
        if found := [*misfits(options), *restart_acts(options, topology.spans_hosts)]:
            return located(resolved, found)
        try:
            if options.resume is not None:
                self._resumes(resolved)
            anew = options.resume is None or (self.resumption is not None and not self.resumption.cut)
            if anew and options.load is not None and not is_simulated(topology):
                self.origin = find_origin(resolved, self.node)
        except ConfigError as refused:
            found = [*refused.violations]
        if options.resume is None and options.run_dir is not None:
            found += refusals(options.run_dir, joins=not topology.has_controller(self.node))
        if found or options.resume is not None or options.run_dir is not None:
            return located(resolved, found)
        return directory_refusals(topology.directory, str(topology.path))

    def _resumes(self, resolved: Resolved) -> None:
        """On the controller's host; on any other the run is joined as it is. Raises ConfigError."""
        options, topology = resolved.options, resolved.topology
        assert topology is not None
        here = {service.role for service in topology.on(self.node)}
        if not topology.has_controller(self.node):
            return
        path = named(options, topology.directory)
        assert path is not None
        found = find(path, options)
        if found.checkpoint is not None and not is_simulated(topology):
            models = [role for role in found.checkpoint.parts if role in here]
            if refused := list(unfit(found.checkpoint, resolved, models, OPTION)):
                raise ConfigError(refused)
        self.resumption = found

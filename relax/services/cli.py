"""bin/relax-service: one service in the foreground.

    relax-service ROLE --topology FILE --name NAME [--run-dir DIR | --controller ENDPOINT] [options]

The launcher starts every service this way, so a service started by hand is the same process.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from relax.config.checks import model_ranks
from relax.config.flags import Parser
from relax.config.resolve import Resolved, load
from relax.config.schema import REPLICATED, ROLES
from relax.config.simulated import SIMULATED
from relax.config.topology import Service as Entry
from relax.config.violation import ConfigError, Violation
from relax.launch.process import IN_VAIN
from relax.launch.sweep import MARK

# role -> module and class of its service; imported only by the process that is it.
SERVICES = {
    "controller": "relax.services.controller:Controller",
    "rollout": "relax.services.rollout:Rollout",
    "reward": "relax.services.reward:Reward",
    "advantages": "relax.services.advantages:Advantages",
    "actor": "relax.services.actor:Actor",
    "critic": "relax.services.critic:Critic",
    "reference": "relax.services.reference:Reference",
}
# role of a model on ranks -> module and class of what each rank does. torchrun starts this module again for each rank.
RANKED = {
    "actor": "relax.services.actor_work:ActorWork",
    "critic": "relax.services.critic_work:CriticWork",
    "reference": "relax.services.reference_work:ReferenceWork",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser("relax-service", "One service of a run, in the foreground.")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--topology", type=Path, required=True, help="the topology file of the run")
    parser.add_argument("--name", help="which service of the topology (default: the only one of its role)")
    try:
        given = parser.parse(arguments)
        own = given.own
        resolved = load(given, own.topology, machine=MARK not in os.environ)
        if resolved.sources["resume"] == "flag":
            problem = "is for relax-launch: a service takes part in the run as it was opened"
            fix = "Leave it out; the service finds in the run's directory what it goes on from."
            raise ConfigError([Violation("--resume", str(resolved.options.resume), problem, fix, "flag")])
        entry = _entry(resolved, own.role, own.name)
        settle(entry)
        if _has_ranks(entry) and "RANK" not in os.environ:
            _become_torchrun(resolved, entry, arguments)
        return run(resolved, entry)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def run(resolved: Resolved, entry: Entry) -> int:
    """Take part in the run as `entry` and return the exit code of the service."""
    from relax.logs.setup import configure
    from relax.protocol.errors import PeerSilent
    from relax.services.join import join_run

    try:
        context = join_run(resolved, entry)
    except PeerSilent as silent:
        print(f"no controller: {silent}; start it, or raise --startup-timeout", file=sys.stderr)
        return IN_VAIN
    rank = int(os.environ.get("RANK", "0"))
    name = entry.name if rank == 0 else f"{entry.name}.rank{rank}"
    # The launcher shows what went wrong; whoever starts a service by hand looks at its output.
    alone = True if MARK not in os.environ else None
    configure(context.run.log(name), name, context.options.log_level, console=alone, run=context.run.run_id)
    if rank > 0:
        from relax.services.ranks import follow_run

        return follow_run(context, RANKED[entry.role])
    service: Any = resolve_name(SERVICES[entry.role])
    return service.start(context)


def _has_ranks(entry: Entry) -> bool:
    return entry.role in RANKED and entry.engine != SIMULATED


def settle(entry: Entry) -> None:
    """Takes the cores, threads and devices that the topology gives this service, for it and its children. Before any
    library that counts threads is imported."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(entry.threads)
    if entry.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, entry.devices))
    if entry.cores:
        os.sched_setaffinity(0, entry.cores)


def _entry(resolved: Resolved, role: str, name: str | None) -> Entry:
    topology = resolved.topology
    assert topology is not None
    of_role = topology.role(role)
    if name is None and len(of_role) == 1:
        return of_role[0]
    entry = topology.service(name or "")
    if entry is None or entry.role != role:
        names = ", ".join(e.name for e in of_role) or "none"
        more = " To add one to a run, give a copy of that file with more replicas." if role in REPLICATED else ""
        raise ConfigError(
            [
                Violation(
                    "--name", name, f"is no {role} service of {topology.path}", f"Its {role} services: {names}.{more}"
                )
            ]
        )
    return entry


def _become_torchrun(resolved: Resolved, entry: Entry, arguments: list[str]) -> None:
    ranks = entry.ranks or model_ranks(entry.options(resolved.options))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    # Port 0: the rendezvous takes a free port and keeps it; nothing is probed first.
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", f"relax-{os.getpid()}"]
    command += ["--max-restarts", "0", "-m", "relax.services.cli", *arguments]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())

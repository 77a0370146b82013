"""relax-launch: checks a run, starts its services on this node, shows its progress and clears up after it."""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from relax.config.budget import RestartBudget
from relax.config.checks import warnings
from relax.config.flags import Parser
from relax.config.keys import KeyProblem
from relax.config.options import Options
from relax.config.resolve import Resolved
from relax.config.schema import RESTARTED
from relax.config.tail import planned_batches
from relax.config.violation import ConfigError, Violation
from relax.launch.accept import Accepted, accept
from relax.launch.firsterror import first_error
from relax.launch.keygen import Keygen
from relax.launch.outcome import Ended, record
from relax.launch.plan import Command, bounds, describe, mark_of, plan, service_command
from relax.launch.progress import PlainView, Progress, TableView, View
from relax.launch.resume import Resumption, find, newest_marked
from relax.launch.rundir import Life, RunDir, numbered
from relax.launch.stopping import Stopped, StopSignals, stop_signals
from relax.launch.supervisor import ENDING_SECONDS, POLL_SECONDS, Outcome, Supervisor
from relax.launch.sweep import processes_of
from relax.metrics.history import end_of_rows, read_rows
from relax.protocol.errors import PeerSilent
from relax.protocol.hello import ask_run
from relax.protocol.security import Security

REFUSED = 2


def main(argv: Sequence[str] | None = None, command: Command = service_command) -> int:
    """The exit code: 0 when the work was done, 1 when a service failed, 2 when the run was refused, 128 + signal when
    it was stopped. `command` says how a service is started."""
    parser = Parser("relax-launch", "Starts the services of a topology on this node and supervises them.")
    parser.add_argument("topology", type=Path, help="topology file, e.g. topologies/local.yaml")
    parser.add_argument("--node", help="start the services of this node only (default: all)")
    parser.add_argument("--keygen", action=Keygen, metavar="DIR", help="make a new key for --keys in DIR, and exit")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show options and plan, start nothing")
    with stop_signals() as signals:
        try:
            wanted = accept(parser.parse(sys.argv[1:] if argv is None else argv))
            for warning in warnings(wanted.resolved):
                print(f"warning: {warning}", file=sys.stderr)
            if wanted.given.own.dry_run:
                print("\n\n".join([describe(wanted.resolved, wanted.node), *wanted.begins(), "Nothing was started."]))
                return 0
            return _launch(wanted, command, signals)
        except ConfigError as refused:
            return _refuse(refused.violations)
        except PeerSilent as silent:
            print(f"no controller: {silent}; start its node, or raise --startup-timeout", file=sys.stderr)
            return 1
        except Stopped as stopped:
            print(f"stopped by {stopped}; nothing was started", file=sys.stderr)
            return 128 + stopped.kind


def _refuse(violations: Sequence[Violation]) -> int:
    count = f"{len(violations)} reasons" if len(violations) > 1 else "1 reason"
    print(f"refused, for {count}:", file=sys.stderr)
    for violation in violations:
        print(f"  - {violation}", file=sys.stderr)
    print("Nothing was started.", file=sys.stderr)
    return REFUSED


def _launch(wanted: Accepted, command: Command, signals: StopSignals) -> int:
    """Raises ConfigError and PeerSilent where the run cannot be opened or joined, Stopped by a signal until then."""
    with signals.noted():  # from here on there is something to clear up
        life = asyncio.run(_life(wanted.resolved, wanted.node, signals))
        run = _open_run(wanted.resolved, wanted.node, wanted.resumption, life)
        return _run(wanted, command, run, signals)


def _run(wanted: Accepted, command: Command, run: RunDir, signals: StopSignals) -> int:
    """A run that is open, from its first life to the end of its last."""
    resolved, node = wanted.resolved, wanted.node
    options, began = resolved.options, datetime.now(UTC)
    print(f"run directory: {run.path}")
    for line in wanted.begins():
        print(line)
    processes = plan(resolved, run, node, wanted.given.options, command)
    print(f"services: {', '.join(process.name for process in processes)}")
    print(f"bounds: {bounds(resolved)}", flush=True)
    progress = Progress(run.metrics, planned_batches(options), end_of_rows(run.metrics))
    view = TableView(progress, run.path.name) if sys.stdout.isatty() else PlainView(progress, sys.stdout)
    budget, resumed = RestartBudget.parse(options.restart_budget), deque[float]()
    with view:
        while True:
            outcome = _live(wanted, command, run, view, signals)
            while resumed and time.monotonic() - resumed[0] >= budget.seconds:
                resumed.popleft()
            if not options.restart or not _resumable(outcome, resolved) or len(resumed) >= budget.restarts:
                break
            resumed.append(time.monotonic())
            print(f"{outcome.text}; the run is resumed", file=sys.stderr, flush=True)
            _await_others(run, options.peer_timeout + ENDING_SECONDS, signals)
            if signals.first is not None:
                break
            try:
                found = find(run.path, options)
                run, began = _resume(resolved, found), datetime.now(UTC)
            except ConfigError as refused:
                for violation in refused.violations:
                    print(f"it cannot be resumed: {violation}", file=sys.stderr)
                break
            print(f"resume: {found}", file=sys.stderr, flush=True)
    return _report(run, node, outcome, began, options.save)


def _live(wanted: Accepted, command: Command, run: RunDir, view: View, signals: StopSignals) -> Outcome:
    """One life of the run, from the start of its services to the end of the last."""
    options = wanted.resolved.options
    run.keep_topology(wanted.node, wanted.resolved.topology_text)
    supervisor = Supervisor(
        run,
        plan(wanted.resolved, run, wanted.node, wanted.given.options, command),
        mark=mark_of(run, wanted.node),
        signals=signals,
        peer_timeout=options.peer_timeout,
        startup_timeout=options.startup_timeout,
        budget=RestartBudget.parse(options.restart_budget),
        restarted=_restarted(options),
        tick=view.tick,
    )
    outcome = supervisor.run()
    view.tick(supervisor.children)
    return outcome


def _await_others(run: RunDir, seconds: float, signals: StopSignals) -> None:
    """Services that were started by hand end with the life of the run that they belong to: at the word of its
    controller or, where that was killed, when it has been silent for the peer timeout."""
    end, told = time.monotonic() + seconds, False
    while run.goes_on() and time.monotonic() < end and signals.first is None:
        if not told:
            print(f"waiting for services that were started by hand to end, at most {seconds:g} s", file=sys.stderr)
        told = True
        time.sleep(POLL_SECONDS)


def _resumable(outcome: Outcome, resolved: Resolved) -> bool:
    """Whether one of those failed without whom a run does not go on; what ends for another reason would again."""
    assert resolved.topology is not None
    roles = {service.name: service.role for service in resolved.topology.services}
    failed = {roles[name] for name in outcome.failed}
    return outcome.code == 1 and bool(failed) and not failed & _restarted(resolved.options)


def _resume(resolved: Resolved, found: Resumption) -> RunDir:
    config, topology = resolved.config_yaml(), resolved.topology_text
    return RunDir.resume(found.path, found.cut, after=found.lineage - 1, config=config, topology=topology)


def _restarted(options: Options) -> frozenset[str]:
    """A reference that was refreshed would need a version that may be stored no more."""
    return RESTARTED - {"reference"} if options.ref_update_interval is not None else RESTARTED


async def _life(resolved: Resolved, node: str | None, signals: StopSignals) -> Life | None:
    """The life of the run that the controller tells of; None on its own node, which opens one.

    Waits for it as long as the startup timeout (PeerSilent), or until a signal comes (Stopped).
    """
    topology, options = resolved.topology, resolved.options
    assert topology is not None
    if topology.has_controller(node):
        return None
    assert topology.controller is not None  # checked: a topology of several hosts names its controller's endpoint
    print(f"waiting for the controller at {topology.controller}", flush=True)
    try:
        security = Security.of(options.insecure, options.keys)
    except KeyProblem as refused:
        raise ConfigError([refused.violation]) from None
    asking = asyncio.create_task(ask_run(topology.controller, options.startup_timeout, security))
    while not (await asyncio.wait({asking}, timeout=POLL_SECONDS))[0]:
        if signals.first is not None:
            asking.cancel()
            await asyncio.wait({asking})
            raise Stopped(signals.first)
    return asking.result()


def _open_run(resolved: Resolved, node: str | None, found: Resumption | None, life: Life | None) -> RunDir:
    """A new run, or the one that was found, or the controller's `life` joined."""
    topology, options = resolved.topology, resolved.options
    assert topology is not None
    config, text = resolved.config_yaml(), resolved.topology_text
    if life is None:
        if found is not None:
            return _resume(resolved, found)
        path = options.run_dir or numbered(topology.directory, options.run_name)
        return RunDir.create(path, config=config, topology=text)
    run = RunDir.join(
        options.run_dir,
        life,
        name=options.run_name,
        directory=topology.directory,
        config=config,
        topology=text,
    )
    if others := processes_of(mark_of(run, node)):
        run.leave()
        pids = ", ".join(str(process.pid) for process in others[:3])
        raise ConfigError([Violation("--node", node, f"its services run here already (pid {pids}, ...)", "", "flag")])
    return run


def _trained(run: RunDir) -> int:
    """Batches, by the metrics; none where they are on another host."""
    rows = read_rows(run.metrics)
    return int(rows[-1]["batch"]) + 1 if rows else 0


def _report(run: RunDir, node: str | None, outcome: Outcome, began: datetime, saves: bool) -> int:
    for what, place in (("metrics", run.metrics), ("model", run.export_dir), ("samples", run.samples_dir)):
        if place.is_file() or (place.is_dir() and any(place.iterdir())):
            print(f"{what + ':':<14} {place}")
    if (newest := newest_marked(run)) is not None:
        print(f"{'checkpoint:':<14} {newest.path}")
    print(f"{'logs:':<14} bin/relax-logs {run.path}")
    error = first_error(run, outcome.ended_at, outcome.failed, outcome.since, began) if outcome.failed else None
    if outcome.failed:
        sys.stdout.flush()
        print(f"failed: {outcome.text}", file=sys.stderr)
        if error is not None:
            print(error, file=sys.stderr)
    else:
        print(outcome.text)
    if saves and not outcome.code and (trained := _trained(run)) > (newest.batch if newest else 0):
        why = f"bin/relax-logs {run.path} --where event=checkpoint_not_written"
        print(f"warning: batch {trained - 1} is trained and in no checkpoint: {why}", file=sys.stderr)
    try:
        record(run, node, Ended(datetime.now(UTC), outcome.code, outcome.text, error.line if error else ""))
    except OSError as problem:
        print(f"warning: {run.logs_dir} does not say how the run ended: {problem}", file=sys.stderr)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())

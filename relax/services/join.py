"""How a process finds its run: in a directory on this host, or by asking a controller over TCP."""

import asyncio
from pathlib import Path

from relax.config.keys import KeyProblem
from relax.config.options import Options
from relax.config.resolve import Resolved
from relax.config.schema import RANKED
from relax.config.topology import Service as Entry
from relax.config.violation import ConfigError, Violation
from relax.launch.load import check_marked
from relax.launch.rundir import RunDir
from relax.protocol.hello import ask_run
from relax.protocol.security import Security
from relax.services.service import Context


def join_run(resolved: Resolved, entry: Entry) -> Context:
    """The context of a service. Raises ConfigError when neither a run directory nor a controller is named, PeerSilent
    when the controller does not answer within the startup timeout."""
    o, topology = resolved.options, resolved.topology
    assert topology is not None
    endpoint = o.controller or topology.controller
    config, text = resolved.config_yaml(), resolved.topology_text
    try:
        security = Security.of(o.insecure, o.keys)
    except KeyProblem as refused:
        raise ConfigError([refused.violation]) from None
    if o.run_dir is not None:
        run = RunDir.create_or_join(o.run_dir, config=config, topology=text, deadline=o.startup_timeout)
    elif entry.role == "controller":
        run = RunDir.create(None, name=o.run_name, directory=topology.directory, config=config, topology=text)
        print(f"run directory: {run.path}", flush=True)
    elif endpoint is not None:
        life = asyncio.run(ask_run(endpoint, o.startup_timeout, security))
        run = RunDir.join(None, life, name=o.run_name, directory=topology.directory, config=config, topology=text)
    else:
        problem = "is needed by a service started alone"
        fix = "Give every service of the run the same --run-dir, or over TCP the --controller."
        raise ConfigError([Violation("--run-dir", None, problem, fix)])
    return Context(
        name=entry.name,
        options=o,
        run=run,
        node=entry.node or "",
        controller=endpoint or run.endpoint("controller"),
        host=topology.address(entry),
        model_options=entry.options(o),
        security=security,
        engine=entry.engine or "",
        index=entry.index,
        lineage=run.lineage,
        cut=run.cut,
        checkpoint=run.checkpoint or _loaded_from(o, entry),
    )


def _loaded_from(options: Options, entry: Entry) -> Path | None:
    """The checkpoint that a run begins with at batch 0, whose model this host needs only for a service that has one.
    Raises ConfigError when it is none."""
    if options.load is not None and entry.role in RANKED:
        check_marked(options.load)
    return options.load

"""How a service process finds its run: in a directory on this host, or by asking a controller over TCP."""

from relax.config.resolve import Resolved
from relax.config.topology import Service as Entry
from relax.config.violation import ConfigError, Violation
from relax.launch.rundir import RunDir
from relax.services.service import Context


def join_run(resolved: Resolved, entry: Entry) -> Context:
    """The context of a service. Raises ConfigError when neither a run directory nor a controller is named."""
    o, topology = resolved.options, resolved.topology
    assert topology is not None
    if o.run_dir is None:
        raise ConfigError(
            [
                Violation(
                    "--run-dir",
                    None,
                    "is needed by a service started alone",
                    "Give every service of the run the same --run-dir, or over TCP the --controller.",
                )
            ]
        )
    run = RunDir.create_or_join(
        o.run_dir, config=resolved.config_yaml(), topology=resolved.topology_text, deadline=o.startup_timeout
    )
    return Context(
        name=entry.name,
        options=o,
        run=run,
        node=entry.node or "",
        controller=o.controller or topology.controller or run.endpoint("controller"),
        host=topology.address(entry),
    )

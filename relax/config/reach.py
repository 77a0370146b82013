"""Which endpoints of a run other hosts can reach, and that these have keys, or the user's word that they need none."""

from collections.abc import Iterator

from relax.config.fields import flag
from relax.config.options import Options
from relax.config.resolve import Resolved
from relax.config.violation import Violation


def other_hosts_need_keys(resolved: Resolved) -> Iterator[Violation]:
    """A run that other hosts can reach has --keys or --insecure, one that they cannot reach has neither."""
    options, topology = resolved.options, resolved.topology
    if options.controller and not options.controller.startswith(("tcp://", "ipc://")):
        yield _refuse(options, "controller", "is no endpoint", "Write tcp://<host>:<port> or ipc://<path>.")
    endpoints = [options.controller or (topology.controller if topology else None) or ""]
    if topology is not None:
        # Services on a node with an address bind there, whether or not there is a second node.
        used = dict.fromkeys(address for service in topology.services if (address := topology.address(service)))
        endpoints += [f"tcp://{address}:0" for address in used]
    beyond = [endpoint for endpoint in endpoints if endpoint.startswith("tcp://") and not _is_loopback(endpoint)]
    if options.keys and options.insecure:
        yield _refuse(options, "insecure", "gives up what --keys gives", "Keep one; with keys the run is safe.")
    elif beyond and not options.keys and not options.insecure:
        problem = f"is needed: {beyond[0]} is reachable from other hosts, in plain text and by anyone"
        fix = (
            "Make keys with `relax-launch --keygen DIR`, copy DIR to every host and give --keys DIR; "
            "or add --insecure if the network is yours alone."
        )
        yield _refuse(options, "keys", problem, fix)
    for name in ("keys", "insecure"):
        if getattr(options, name) and not beyond:
            yield _refuse(options, name, "cannot act: no endpoint is reachable from other hosts", "Leave it out.")


def _refuse(options: Options, name: str, problem: str, fix: str) -> Violation:
    return Violation(flag(name), getattr(options, name), problem, fix)


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")

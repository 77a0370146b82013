"""When a run cannot go on: somebody did not come, or not again; nothing moves; nothing could be trained."""

from collections.abc import Callable

from relax.config.options import Options
from relax.ledger.states import Conservation
from relax.services.control.registry import Registry


def trouble(
    registry: Registry, options: Options, *, now: float, started: float, moved: float, waits: Callable[[], str]
) -> str | None:
    """What ends the run now, with the name of who is to blame; None while all is well.

    Times are monotonic seconds: `started` of the controller, `moved` of the last sign of progress. `waits` says what
    the next batch waits for. A service that hangs ends by itself after the stall timeout; that it did is known here
    when its next life registers, or when it has been silent for the peer timeout. Until then the run may go on.
    """
    if missing := registry.missing(now, started, options.startup_timeout):
        names = " and no ".join(missing)
        return f"no {names} service has joined within --startup-timeout {options.startup_timeout:g} s"
    if now - moved > options.stall_timeout + options.peer_timeout:
        who = "; ".join(f"{entry.member.name} is {entry.activity}" for entry in registry.entries.values())
        bounds = f"--stall-timeout {options.stall_timeout:g} s + --peer-timeout {options.peer_timeout:g} s"
        return f"nothing has moved for {bounds}: {waits()}; {who}"
    return None


def nothing_trained(groups: Conservation) -> str:
    """What a run ends with whose data was used up before there was a batch."""
    if not groups.issued:
        return "no batch was trained: the data has no prompt that fits --rollout-max-prompt-len"
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(groups.dropped.items()))
    return f"no batch was trained: every group of the data was dropped ({reasons}); change the filter or the data"

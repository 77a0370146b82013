"""Which groups have held a commit up for too long. No clock inside: the caller says what time it is."""

from relax.gate.verdicts import Blocked, Wait

# After this many rejected draws, as stragglers or for another reason, a prompt is set aside.
STRIKES = 3


class Stragglers:
    """Groups that block a commit for longer than `timeout` seconds, by what `Gate.blocked` names.

    A group blocks a commit in one of two ways. P groups are ready and it is due: without it the batch would go at once.
    Or too few are ready and nothing but the groups on their way could fill the batch: another draw in its place may be
    sooner. In the second way a `timeout` of 0 is not used, for it would drop every draw at its issue.

    A group that is due while too few are ready blocks nothing yet: to drop it would let no batch go.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._since: dict[int, float] = {}  # group -> when it was first named, without a pause since

    def overdue(self, blocked: Blocked, now: float) -> tuple[int, ...]:
        """Those of the named groups that have blocked for longer than the timeout, in the order of their names; at
        least `blocked.needed` of all that are named must go. `now` is in seconds and only rises.

        They are told of once: a group keeps its number when its prompt is drawn again, and the new draw has the whole
        timeout for itself."""
        if blocked.missing and (blocked.wait is not Wait.READY or self.timeout == 0):
            named: tuple[int, ...] = ()
        else:
            named = blocked.groups
        self._since = {group: self._since.get(group, now) for group in named}
        overdue = tuple(group for group, since in self._since.items() if now - since >= self.timeout)
        for group in overdue:
            del self._since[group]
        return overdue

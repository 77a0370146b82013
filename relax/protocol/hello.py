"""The first word of a process that knows a controller's endpoint and nothing of its run."""

import secrets

from relax.protocol.envelope import STRANGER
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Hello, Welcome
from relax.protocol.security import Security


async def ask_run(controller: str, deadline: float, security: Security) -> Welcome:
    """Which run, and which life of it, has its controller at `controller`; waits for it at most `deadline` seconds
    (PeerSilent)."""
    token = secrets.token_hex(4)
    async with Mailbox(
        f"stranger-{token}",
        run_id=STRANGER,
        lineage=0,
        incarnation=token,
        bind=f"inproc://stranger-{token}",
        security=security,
    ) as mailbox:
        reply = await mailbox.ask(controller, Hello(), deadline)
        assert isinstance(reply, Welcome)
        return reply

"""What one process owes its parent: its end, and how it ended."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
# Exit code of a service that was refused, or told that the run has failed: it is not to be started again.
IN_VAIN = 2


def die_with_parent(kind: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send `kind` to this process when the thread that started it ends.

    A parent that is gone already is noticed: the process then ends at once. Linux only; elsewhere it does nothing.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        return
    if libc.prctl(PR_SET_PDEATHSIG, int(kind), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), kind)

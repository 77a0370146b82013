"""The guard: a small process that outlives its starter just long enough to clear up after it.

It waits on a pipe whose other end only the starter holds. End of file means that the starter is gone, however it went;
the guard then ends every process of the run on this host and removes its sockets and shared memory.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from relax.launch.places import remove_if_dead
from relax.launch.sweep import MARK, sweep


class Guard:
    """The starter's side.

    `mark` is the value of RELAX_RUN_ID in the environment of the processes to end. The launcher's is the run id. A
    service started alone may have a guard for its own children, with a mark of its own (`<run id>.<name>`): the run's
    places are removed only when nobody takes part any more.
    """

    def __init__(self, mark: str, runtime_dir: Path, shm_dir: Path) -> None:
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "relax.launch.guard", mark, str(runtime_dir), str(shm_dir)],
                # Not marked itself: a sweep of an outer run must not take this run's guard first.
                env={name: value for name, value in os.environ.items() if name != MARK},
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def watch(self, session: int) -> None:
        """Every process of this session is to end too, whatever its environment says."""
        self._tell(session)

    def forget(self, session: int) -> None:
        """Nothing of this session is left: its number may be given to a session of anybody."""
        self._tell(-session)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, f"{number}\n".encode())

    def dismiss(self, deadline: float = 10.0) -> None:
        """Lets the guard do its round and waits for it to end; kills it at the deadline."""
        os.close(self._pipe)
        try:
            self._process.wait(deadline)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(mark: str, runtime_dir: Path, shm_dir: Path) -> None:
    # Whatever ends the starter must not end its guard: a terminal that closes, a group that is signalled.
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    sessions: set[int] = set()
    for number in map(int, sys.stdin):
        (sessions.add if number > 0 else sessions.discard)(abs(number))
    sweep(mark, sessions)
    remove_if_dead(runtime_dir, shm_dir)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

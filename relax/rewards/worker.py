"""The child process that runs a reward function: `python -m relax.rewards.worker FD PARENT SPEC`.

Over the inherited socket FD it sends `{"ready": true}` or `{"error": traceback}`, then for each item `{"value": number
or null}` or `{"failed": kind, "detail": text}`. It is killed by its parent at the time limit, and by the kernel when
the parent dies. Only ever run, never imported.
"""

import ctypes
import math
import numbers
import os
import signal
import socket
import sys
import traceback
from typing import Any

from relax.functions import FunctionError
from relax.rewards.spec import VerifierSpec
from relax.rewards.verifiers import Verifier, build
from relax.rewards.wire import encode, read

_PR_SET_PDEATHSIG = 1


def score(verifier: Verifier, item: dict[str, Any]) -> dict[str, Any]:
    """The reply for one item. Whatever a reward function raises is reported, never paid as 0."""
    try:
        value = verifier(item["prompt"], item["response"], item["label"], item["row"])
    except (Exception, SystemExit) as error:
        # The frames of this module would only hide the user's.
        text = "".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next)))  # type: ignore[union-attr]
        return {"failed": "exception", "detail": text[-20_000:]}
    if value is None:
        return {"value": None}
    if not isinstance(value, numbers.Real):
        return _bad_value(value, "not a number")
    try:
        number = float(value)
    except OverflowError:  # an int or a fraction
        return _bad_value(value, "which is beyond the range of a float")
    if not math.isfinite(number):
        return _bad_value(value, "which is not finite")
    return {"value": number}


def _bad_value(value: Any, problem: str) -> dict[str, Any]:
    try:
        shown = f"{value!r:.200}"
    except Exception:  # Python shows no int of more than 4300 digits, and a user's class may do anything
        shown = "a value that cannot be shown"
    return {"failed": "bad_value", "detail": f"returned {shown} ({type(value).__name__}), {problem}"}


def main() -> None:
    fd, parent, spec = int(sys.argv[1]), int(sys.argv[2]), VerifierSpec.from_json(sys.argv[3])
    os.setpgid(0, 0)  # its own group: what the reward function starts is killed with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes its workers
    connection = socket.socket(fileno=fd)
    stream = connection.makefile("rb")
    try:
        verifier = build(spec)
    except FunctionError as error:
        connection.sendall(encode({"error": str(error)}))
        return
    except (Exception, SystemExit):
        connection.sendall(encode({"error": traceback.format_exc()[-20_000:]}))
        return
    connection.sendall(encode({"ready": True}))
    while (item := read(stream)) is not None:
        connection.sendall(encode(score(verifier, item)))


if __name__ == "__main__":
    main()

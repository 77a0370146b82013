"""relax-status: how a run stands, read from its directory alone."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from relax.config.violation import ConfigError
from relax.status.look import Looker, Status
from relax.status.show import blocks, plain, rich

EPILOG = """\
exit code: 0 the run goes on or has finished; 1 it failed, crashed, was stopped or is silent;
2 there is no run, or a part of its directory cannot be read (the rest is shown all the same)"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 when the run is well, 1 when it is not, 2 when that cannot be told."""
    parser = argparse.ArgumentParser(
        "relax-status",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, e.g. runs/demo-1")
    parser.add_argument("--json", action="store_true", help="all that was found as one JSON object (one a line)")
    parser.add_argument("--watch", type=_seconds, metavar="SECONDS", help="look again so often, until the run is over")
    args = parser.parse_args(argv)
    try:
        looker = Looker(args.run_dir)
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    try:
        code = _show(looker, args.json, args.watch)
        sys.stdout.flush()
    except BrokenPipeError:
        # `relax-status | head`: the reader has had enough. Python would complain again when it closes stdout.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115, PTH123
        return 0
    except KeyboardInterrupt:
        return 0
    return code


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0.1 and 86400")
    return value


def _show(looker: Looker, as_json: bool, every: float | None) -> int:
    if every is not None and not as_json and sys.stdout.isatty():
        return _watch_on_terminal(looker, every)
    while True:
        status = looker.look()
        if as_json:
            print(json.dumps(status.to_json()), flush=True)
        elif sys.stdout.isatty():
            from rich.console import Console

            Console().print(rich(list(blocks(status))))
        else:
            print(plain(list(blocks(status))), flush=True)
        if every is None or not status.state.goes_on:
            return _code(status)
        time.sleep(every)
        if not as_json:
            print()


def _watch_on_terminal(looker: Looker, every: float) -> int:
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            status = looker.look()
            live.update(rich(list(blocks(status))), refresh=True)
            if not status.state.goes_on:
                return _code(status)
            time.sleep(every)


def _code(status: Status) -> int:
    if status.problems:
        return 2
    return 0 if status.state.is_well else 1


if __name__ == "__main__":
    sys.exit(main())

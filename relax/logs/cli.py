"""relax-logs: the logs of all services of a run as one, ordered by time."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from relax.logs.read import LEVELS, Filter, LogFiles, Record, follow
from relax.logs.show import STYLES, clock, message

WHERE = "key=value, e.g. batch=3; several must all hold"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 when there are no logs at the given place."""
    parser = argparse.ArgumentParser("relax-logs", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, e.g. runs/demo-1")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more, until Ctrl-C")
    parser.add_argument("--service", action="append", default=[], help="service, role or pattern; may be repeated")
    parser.add_argument("--level", choices=LEVELS, default="debug", help="least level shown")
    parser.add_argument("--where", action="append", default=[], type=_pair, metavar="KEY=VALUE", help=WHERE)
    parser.add_argument("--json", action="store_true", help="the lines as they were written")
    args = parser.parse_args(argv)
    directory = args.run_dir / "logs"
    if not directory.is_dir():
        print(f"{args.run_dir}: no logs there ({directory} does not exist); name a run directory.", file=sys.stderr)
        return 2
    files = LogFiles(directory)
    chosen = Filter(tuple(args.service), args.level, tuple(args.where))
    records: Iterable[Record] = follow(files) if args.follow else files.read()
    show = _print_json if args.json else _printer()
    try:
        for record in records:
            if chosen.accepts(record):
                show(record)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # `relax-logs | head`: the reader has had enough. Python would complain again when it closes stdout.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115, PTH123
        return 0
    if files.torn:
        print(f"{files.torn} lines are no JSON objects and were left out", file=sys.stderr)
    return 0


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, value


def _print_json(record: Record) -> None:
    print(record.text, flush=True)


def _printer() -> "_Printer":
    return _Printer(color=sys.stdout.isatty())


class _Printer:
    def __init__(self, color: bool) -> None:
        from rich.console import Console

        class PipeConsole(Console):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # rich's own answer is to exit with 1

        self._console = PipeConsole(file=sys.stdout, highlight=False, soft_wrap=True, no_color=not color)
        self._width = 12

    def __call__(self, record: Record) -> None:
        from rich.text import Text

        data = record.data
        service, level = str(data.get("service", "?")), str(data.get("level", "?"))
        self._width = max(self._width, len(service))
        style = STYLES.get(level, "")
        head = Text(f"{clock(data)} ", style="dim")
        head.append(f"{level:<8} ", style=style)
        head.append(f"{service:<{self._width}} ", style="cyan")
        head.append(message(data), style=style if level in ("error", "critical") else "")
        self._console.print(head)


if __name__ == "__main__":
    sys.exit(main())

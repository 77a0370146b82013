"""Turns every log record of a process (ours, the engines', uncaught exceptions) into one JSON object a line.

Each line has `time` (ISO 8601, UTC, microseconds), `level`, `service`, `event`, and the ids that apply (run, batch,
group, sample, version, step). An exception adds `error` (type and message) and `traceback`.
"""

import faulthandler
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog
from structlog.typing import Processor

LEADING = ("time", "level", "service", "event")
Event = MutableMapping[str, Any]


def configure(
    path: Path | None, service: str, level: str = "info", *, console: bool | None = None, **ids: object
) -> None:
    """Sends all logging of this process to the file `path`, each line stamped with `service` and `ids`.

    `console` adds readable lines on stderr; by default only when stderr is a terminal or there is no file. Several
    processes may append to one file: each line is a single write. Call it before the engines are imported, for they
    read VLLM_CONFIGURE_LOGGING at import; a second call replaces the first.
    """
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    stamp = _stamp({"service": service, **{name: value for name, value in ids.items() if value is not None}})
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _add_time,
        _render_exception,
        stamp,
    ]
    handlers: list[logging.Handler] = []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_handler(LineWriter(path), shared, render_json))
    if console or (console is None and (path is None or sys.stderr.isatty())):
        handlers.append(_handler(logging.StreamHandler(sys.stderr), shared, _render_line))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        if isinstance(old, LineWriter):
            old.close()
    for new in handlers:
        root.addHandler(new)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    if not faulthandler.is_enabled():
        faulthandler.enable()


def adopt(*names: str) -> None:
    """Makes the loggers of these libraries (`transformers`, `vllm`, ...) write here and not to stderr on their own.

    Libraries that install their own handler do so at import, hence after `configure`.
    """
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class LineWriter(logging.Handler):
    """Appends each record with one write call, so that lines of several processes never mix."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self._fd, (self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        except Exception:  # as logging does it: a full disk or a value that cannot be shown must not end the service
            self.handleError(record)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()


def render_json(_logger: Any, _method: str, event: Event) -> str:
    """One JSON object with the leading keys first; never a NaN token, never an exception for an odd value."""
    ordered = {key: event[key] for key in LEADING if key in event}
    ordered.update((key, value) for key, value in event.items() if key not in ordered)
    try:
        return json.dumps(ordered, default=_plain, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError):
        return json.dumps(_json_safe(ordered), ensure_ascii=False)


def _handler(handler: logging.Handler, shared: list[Processor], render: Processor) -> logging.Handler:
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                *shared[:-1],
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                shared[-1],
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    return handler


def _stamp(fixed: dict[str, object]) -> Processor:
    def stamp(_logger: Any, _method: str, event: Event) -> Event:
        for name, value in fixed.items():
            event.setdefault(name, value)
        return event

    return stamp


def _add_time(_logger: Any, _method: str, event: Event) -> Event:
    record = event.get("_record")
    moment = datetime.now(UTC) if record is None else datetime.fromtimestamp(record.created, UTC)
    event["time"] = moment.isoformat(timespec="microseconds")
    return event


def _render_exception(_logger: Any, _method: str, event: Event) -> Event:
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()
    error = info if isinstance(info, BaseException) else info[1] if isinstance(info, tuple) else None
    if error is not None:
        event.setdefault("error", f"{type(error).__name__}: {error}")
        event["traceback"] = "".join(traceback.format_exception(error)).rstrip()
    return event


def _render_line(_logger: Any, _method: str, event: Event) -> str:
    # Imported here: relax.logs.show brings rich, which a service without a terminal never needs.
    from relax.logs.show import plain_line

    return plain_line(event)


def _plain(value: object) -> object:
    for attribute in ("tolist", "item"):
        convert = getattr(value, attribute, None)
        if callable(convert):
            return convert()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _json_safe(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    plain = _plain(value)
    return str(plain) if plain is value else _json_safe(plain)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        structlog.get_logger("relax").critical("uncaught exception", exc_info=error)
    sys.__excepthook__(kind, error, trace)


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    thread = args.thread.name if args.thread else "?"
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        structlog.get_logger("relax").critical("uncaught exception", thread=thread, exc_info=args.exc_value)
    threading.__excepthook__(args)

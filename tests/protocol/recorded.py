"""Every kind of message with plausible content, and which kinds each role's mailbox handles, read from the source."""

import ast
import itertools
import random
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np

from relax.protocol import messages, payload
from relax.protocol.codec import _SCHEMAS

SERVICES = Path(__file__).resolve().parents[2] / "relax" / "services"
ROLES = ("controller", "rollout", "reward", "advantages", "actor", "critic", "reference")
NAMES = {"name": "rollout-0", "role": "rollout", "incarnation": "a1", "endpoint": "ipc:///x", "run_id": "run"}


def kinds_of(role: str) -> list[type]:
    """The message classes that the service of a role handles, those of every service included."""
    used = _names(SERVICES / "service.py", "main") | _names(SERVICES / f"{role}.py", "handlers")
    if "Trainer" in (SERVICES / f"{role}.py").read_text():
        used |= _names(SERVICES / "trainer.py", "handlers")
    found = {cls for cls in _SCHEMAS if cls.__module__ == messages.__name__ and cls.__name__ in used}
    if "PayloadStore" in used:
        found.add(payload.FetchPayload)
    return sorted(found, key=lambda cls: cls.__name__)


def _names(file: Path, function: str) -> set[str]:
    """Every name that a function of the file mentions."""
    return {
        node.id
        for defined in ast.walk(ast.parse(file.read_text()))
        if isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef) and defined.name == function
        for node in ast.walk(defined)
        if isinstance(node, ast.Name)
    }


def example(cls: type, draw: random.Random) -> Any:
    """A message of this class."""
    if cls is payload.Payload:
        arrays = {f"part{i}": _array(draw) for i in range(draw.randint(1, 3))}
        return payload.Payload.inline(arrays, f"group {draw.randrange(100)}.1")
    hints = typing.get_type_hints(cls)
    return cls(**{name: NAMES.get(name) or _value(hint, draw) for name, hint in hints.items()})


def _array(draw: random.Random) -> np.ndarray:
    size = draw.choice((0, 1, 7, 100, 3000, 20_000))
    dtype = draw.choice((np.int32, np.float32, np.uint8, np.int64))
    return np.arange(size, dtype=np.int64).astype(dtype)


def _value(hint: Any, draw: random.Random) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if draw.random() < 0.3 else _value(arguments[0], draw)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(_value(arguments[0], draw) for _ in range(draw.randint(0, 4)))
    if origin is tuple:
        return tuple(_value(argument, draw) for argument in arguments)
    if origin is dict:
        return {f"key{i}": _value(arguments[1], draw) for i in range(draw.randint(0, 3))}
    if hint is np.ndarray:
        return _array(draw)
    plain = {int: draw.randrange(1000), float: draw.random(), bool: True, str: "text", bytes: b'{"a": 1}', object: [1]}
    return plain[hint] if hint in plain else example(hint, draw)


def everything(kinds: list[type], draw: random.Random, each: int = 3) -> list[Any]:
    return [example(cls, draw) for cls, _ in itertools.product(kinds, range(each))]

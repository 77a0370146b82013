"""From the annotation of a message's field to the two functions that write and read it.

A field may be `int`, `float`, `str`, `bytes`, `bool`, `None`, `X | None`, `Literal["a", "b"]`, `tuple[X, ...]`,
`tuple[X, Y]`, `dict[str, X]`, `np.ndarray`, another message, or `object`: plain data (None, numbers, text, bytes, lists
and dicts with text keys, to a depth of 32; tuples arrive as lists).

Writing is forgiving where nothing is lost (a numpy integer is an int, an int is a float); reading is exact.
"""

import numbers
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from relax.protocol.arrays import Incoming, _shown, pack_array, unpack_array
from relax.protocol.errors import Refused, SchemaError
from relax.protocol.frames import Outgoing

Pack = Callable[[Any, Outgoing], Any]
Unpack = Callable[[Any, Incoming], Any]
PLAIN_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Field:
    """How one type travels. `text` goes into the schema's fingerprint. `exact` is the type that needs no conversion
    either way (int, str, ...), or None where `pack` and `unpack` must run; `arrays`: whether it can hold an array."""

    text: str
    pack: Pack
    unpack: Unpack
    exact: type | None = None
    arrays: bool = False


def field_of(annotation: Any, message_field: Callable[[type], Field | None]) -> Field:
    """The field for an annotation; `message_field` gives that of a nested message class, None for any other class."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if annotation is np.ndarray or get_origin(annotation) is np.ndarray:
        return Field("array", pack_array, unpack_array, arrays=True)
    if annotation is object or annotation is Any:
        return Field("plain", lambda value, _: _plain(value, 0, (list, tuple), TypeError), _unpack_plain)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _literal(args)
    if origin in (Union, types.UnionType):
        rest = [a for a in args if a is not type(None)]
        if len(rest) == 1 and len(args) == 2:
            return _optional(field_of(rest[0], message_field))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(field_of(args[0], message_field))
    if origin is tuple and args and Ellipsis not in args:
        return _fixed([field_of(a, message_field) for a in args])
    if origin is dict and args[0] is str:
        return _mapping(field_of(args[1], message_field))
    nested = message_field(annotation) if isinstance(annotation, type) else None
    if nested is None:
        hint = " (messages are frozen: use tuple[X, ...])" if list in (annotation, origin) else ""
        raise SchemaError(f"type {annotation!r} cannot travel{hint}")
    return nested


def _wrong(expected: str, value: object) -> Refused:
    return Refused("type", f"expected {expected}, got {type(value).__name__} {_shown(value)}")


def _scalar(exact: type, name: str, normal: Callable[[Any], Any]) -> Field:
    def pack(value: Any, _: Outgoing) -> Any:
        return value if type(value) is exact else normal(value)

    def unpack(wire: Any, _: Incoming) -> Any:
        if type(wire) is not exact:
            raise _wrong(name, wire)
        return wire

    return Field(name, pack, unpack, exact)


def _normal(name: str, accepted: tuple[type, ...], convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def normal(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool | np.bool_) and name != "bool"):
            raise TypeError(f"expected {name}, got {type(value).__name__} {_shown(value)}")
        return convert(value)

    return normal


_SCALARS: dict[Any, Field] = {
    int: _scalar(int, "int", _normal("int", (numbers.Integral,), int)),
    float: _scalar(float, "float", _normal("float", (numbers.Real,), float)),
    str: _scalar(str, "str", _normal("str", (str,), str)),
    bytes: _scalar(bytes, "bytes", _normal("bytes", (bytes, bytearray, memoryview), bytes)),
    bool: _scalar(bool, "bool", _normal("bool", (bool, np.bool_), bool)),
    type(None): _scalar(type(None), "none", _normal("none", (), bool)),
}


def _literal(choices: tuple) -> Field:
    names = ", ".join(map(repr, choices))

    def chosen(value: Any) -> bool:
        return any(type(value) is type(c) and value == c for c in choices)

    def pack(value: Any, _: Outgoing) -> Any:
        if not chosen(value):
            raise TypeError(f"expected one of {names}, got {_shown(value)}")
        return value

    def unpack(wire: Any, _: Incoming) -> Any:
        if not chosen(wire):
            raise _wrong(f"one of {names}", wire)
        return wire

    return Field(f"literal[{names}]", pack, unpack)


def _optional(inner: Field) -> Field:
    def pack(value: Any, out: Outgoing) -> Any:
        return None if value is None else inner.pack(value, out)

    def unpack(wire: Any, frames: Incoming) -> Any:
        return None if wire is None else inner.unpack(wire, frames)

    return Field(f"{inner.text}?", pack, unpack, arrays=inner.arrays)


def _each(fields: list[Field], values: Any, unpack: bool, context: Any) -> list:
    out: list = []
    try:
        for field, value in zip(fields, values, strict=True):
            out.append((field.unpack if unpack else field.pack)(value, context))
    except Refused as refused:
        raise refused.within(f"[{len(out)}]") from None
    except TypeError as error:
        raise TypeError(f"[{len(out)}]: {error}") from None
    return out


def _sequence(inner: Field) -> Field:
    exact = inner.exact

    def pack(value: Any, out: Outgoing) -> Any:
        if not isinstance(value, tuple | list):
            raise TypeError(f"expected a tuple, got {type(value).__name__} {_shown(value)}")
        if exact is not None and all(type(v) is exact for v in value):
            return value
        return _each([inner] * len(value), value, False, out)

    def unpack(wire: Any, frames: Incoming) -> tuple:
        if type(wire) is not list:
            raise _wrong("a sequence", wire)
        if exact is not None and all(type(v) is exact for v in wire):
            return tuple(wire)
        return tuple(_each([inner] * len(wire), wire, True, frames))

    return Field(f"({inner.text}...)", pack, unpack, arrays=inner.arrays)


def _fixed(fields: list[Field]) -> Field:
    def pack(value: Any, out: Outgoing) -> list:
        if not isinstance(value, tuple | list) or len(value) != len(fields):
            raise TypeError(f"expected a tuple of {len(fields)}, got {_shown(value)}")
        return _each(fields, value, False, out)

    def unpack(wire: Any, frames: Incoming) -> tuple:
        if type(wire) is not list or len(wire) != len(fields):
            raise _wrong(f"a sequence of {len(fields)}", wire)
        return tuple(_each(fields, wire, True, frames))

    text = ",".join(f.text for f in fields)
    return Field(f"({text})", pack, unpack, arrays=any(f.arrays for f in fields))


def _mapping(inner: Field) -> Field:
    def pack(value: Any, out: Outgoing) -> dict:
        if not isinstance(value, dict) or not all(type(k) is str for k in value):
            raise TypeError(f"expected a dict with text keys, got {_shown(value)}")
        packed = {}
        for key, item in value.items():
            try:
                packed[key] = inner.pack(item, out)
            except TypeError as error:
                raise TypeError(f"[{key!r}]: {error}") from None
        return packed

    def unpack(wire: Any, frames: Incoming) -> dict:
        if type(wire) is not dict:
            raise _wrong("a mapping", wire)
        read = {}
        for key, item in wire.items():
            if type(key) is not str:
                raise _wrong("text as a key", key)
            try:
                read[key] = inner.unpack(item, frames)
            except Refused as refused:
                raise refused.within(f"[{_shown(key)}]") from None
        return read

    return Field(f"{{{inner.text}}}", pack, unpack, arrays=inner.arrays)


def _plain(value: Any, depth: int, sequences: tuple[type, ...], error: type[Exception]) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if depth >= PLAIN_DEPTH:
        raise error(f"plain data is nested deeper than {PLAIN_DEPTH}")
    if type(value) in sequences:
        return [_plain(v, depth + 1, sequences, error) for v in value]
    if type(value) is dict:
        if not all(type(k) is str for k in value):
            raise error(f"plain data has keys that are no text: {_shown(value)}")
        return {k: _plain(v, depth + 1, sequences, error) for k, v in value.items()}
    raise error(f"{type(value).__name__} {_shown(value)} is no plain data")


def _unpack_plain(wire: Any, _: Incoming) -> Any:
    return _plain(wire, 0, (list,), _plain_refused)  # type: ignore[arg-type]


def _plain_refused(problem: str) -> Refused:
    return Refused("type", problem)


def type_hints(cls: type) -> dict[str, Any]:
    """Resolved annotations; a name that cannot be resolved is an error of the declaration."""
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise SchemaError(f"message {cls.__qualname__}: {error}; declare message classes at module level") from error

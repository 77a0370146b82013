"""Messages as bytes: `@message` makes a class that can travel, `encode` and `decode` move it, without pickle.

A message is a frozen dataclass. Its kind is its class name in snake_case; its fingerprint is a digest of the kind and
of the names and types of its fields, nested messages included, so two versions of the code never misread each other:
a message with another fingerprint is refused. The header is one msgpack array (positional, no field names); arrays
follow as raw bytes (`arrays.py`, `frames.py`). Which types a field may have is in `fields.py`.

    @message
    class Ready:
        lease: Lease
        oldest: int
        tokens: np.ndarray      # int32 [T]

Arrays are sent from the memory they lie in: do not change one after handing it over. Received ones are read-only.
"""

import dataclasses
import hashlib
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_origin

import msgpack

from relax.protocol.arrays import Incoming, _shown
from relax.protocol.errors import EncodeError, Refused, SchemaError
from relax.protocol.fields import Field, field_of, type_hints
from relax.protocol.frames import Limits, Outgoing, Packed, check_sizes, pack, split

T = TypeVar("T")
DEFAULT_LIMITS = Limits()
_PREFIX = struct.Struct("<I")


class Schema:
    """How one message class travels: `pack` to plain values, `unpack` back with every type checked."""

    def __init__(self, cls: type, kind: str, names: tuple[str, ...], fields: tuple[Field, ...]) -> None:
        self.cls, self.kind, self.names, self.fields = cls, kind, names, fields
        self.text = f"{kind}({';'.join(f'{n}:{f.text}' for n, f in zip(names, fields, strict=True))})"
        self.fingerprint = int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=6).digest(), "little")
        self.arrays = any(f.arrays for f in fields)
        self._values: Callable[[Any], tuple] = _getter(names)
        # A message of scalars is checked all at once, by comparing tuples of types; others run a function per field.
        self._exact = tuple(f.exact for f in fields)

    def pack(self, message: Any, out: Outgoing) -> Any:
        """Plain values of a message, in field order. Raises EncodeError."""
        values = self._values(message)
        if tuple(map(type, values)) == self._exact:
            return values
        packed = list(values)
        i = 0
        try:
            for i, field in enumerate(self.fields):
                packed[i] = field.pack(values[i], out)
        except EncodeError as error:
            raise EncodeError(self.kind, f"{self.names[i]}.{error.field}", error.problem) from None
        except TypeError as error:
            raise EncodeError(self.kind, self.names[i], str(error)) from None
        return packed

    def unpack(self, wire: Any, frames: Incoming) -> Any:
        """The message of plain values. Raises Refused with the field's path."""
        if type(wire) is not list or len(wire) != len(self.fields):
            raise Refused("type", f"expected the {len(self.fields)} fields of {self.kind}, got {_shown(wire)}")
        if tuple(map(type, wire)) != self._exact:
            i = 0
            try:
                for i, field in enumerate(self.fields):
                    wire[i] = field.unpack(wire[i], frames)
            except Refused as refused:
                raise refused.within(self.names[i]) from None
        try:
            return self.cls(*wire)
        except ValueError as error:
            raise Refused("value", str(error)) from None


_SCHEMAS: dict[type, Schema] = {}
_KINDS: dict[str, Schema] = {}


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass with slots and register it as a message. Raises SchemaError.

    Equality and hash are by value, except for messages that can hold arrays: those compare by identity. A
    `__post_init__` may check values with ValueError; for a received message that is a refusal like any other.
    """
    kind = kind_of(cls)
    fields = {}
    for name, hint in type_hints(cls).items():
        if get_origin(hint) is ClassVar or hint is ClassVar:
            continue
        try:
            fields[name] = field_of(hint, _message_field)
        except SchemaError as error:
            raise SchemaError(f"message {cls.__qualname__}, field {name}: {error}") from None
    by_value = not any(f.arrays for f in fields.values())
    made = dataclasses.dataclass(frozen=True, slots=True, eq=by_value)(cls)
    declared = dataclasses.fields(made)  # type: ignore[arg-type]
    if any(f.kw_only or not f.init for f in declared):
        raise SchemaError(f"message {cls.__qualname__}: fields travel by position; kw_only and init=False do not work")
    names = tuple(f.name for f in declared)
    known = _KINDS.get(kind)
    if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise SchemaError(f"message kind {kind!r} of {cls.__module__} is taken by {known.cls.__module__}")
    schema = Schema(made, kind, names, tuple(fields[n] for n in names))
    _SCHEMAS[made] = _KINDS[kind] = schema
    return made


def kind_of(cls: type) -> str:
    """`TrainBatch` -> `train_batch`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


def schema_of(cls: type) -> Schema:
    """The schema of a message class. Raises SchemaError for any other class."""
    schema = _SCHEMAS.get(cls)
    if schema is None:
        raise SchemaError(f"{cls.__qualname__} is no message class (decorate it with @message)")
    return schema


def schema_for(kind: object, fingerprint: object) -> Schema:
    """The schema named by a header. Raises Refused for a kind not known here or declared otherwise there."""
    schema = _KINDS.get(kind) if type(kind) is str else None
    if schema is None:
        raise Refused("kind", f"unknown message kind {_shown(kind)}", field="kind")
    if fingerprint != schema.fingerprint:
        raise Refused(
            "schema",
            f"{schema.kind} is declared differently there: schema {_shown(fingerprint)}, here {schema.fingerprint} "
            "(do all services run the same version of the code?)",
            field="schema",
            kind=schema.kind,
        )
    return schema


def encode(message: Any, limits: Limits = DEFAULT_LIMITS) -> list[Any]:
    """A message as `[first, frame, ...]`: bytes, then one-dimensional uint8 arrays over the message's own memory.

    For whoever moves frames himself (a rank broadcast, a file). Raises SchemaError, EncodeError.
    """
    packed = pack_message(msgpack.Packer(), [], message, limits)
    return packed.frames(_PREFIX.pack(len(packed.header)))


def decode(frames: Sequence[Any], sender: str = "?", limits: Limits = DEFAULT_LIMITS) -> Any:
    """The message that `encode` wrote. `frames` are bytes-like; arrays lie over them. Raises Refused."""
    kind: Any = "?"
    try:
        check_sizes(list(frames), limits)
        if len(frames[0]) < _PREFIX.size:
            raise Refused("header", f"a first frame of {len(frames[0])} bytes", field="head")
        values, small = split(frames[0], _PREFIX.size, *_PREFIX.unpack_from(frames[0]))
        kind = values[0] if values else "?"
        return unpack_message(values, small, frames[1:])
    except Refused as refused:
        refused.sender, refused.kind = sender, kind if type(kind) is str else "?"
        raise


def pack_message(packer: msgpack.Packer, address: list, message: Any, limits: Limits) -> Packed:
    """A message whose header is `[*address, kind, schema, body]`. Raises SchemaError, EncodeError."""
    schema, out = schema_of(type(message)), Outgoing()
    return pack(
        packer, schema.kind, [*address, schema.kind, schema.fingerprint, schema.pack(message, out)], out, limits
    )


def unpack_message(values: list, small: memoryview | bytes, large: Sequence[Any]) -> Any:
    """The message of `[kind, schema, body]` and the bytes that came with it, every one used once. Raises Refused."""
    if len(values) != 3:
        raise Refused("header", f"expected [kind, schema, body], got {len(values)} entries", field="body")
    kind, fingerprint, body = values
    incoming = Incoming(small, large)
    message = schema_for(kind, fingerprint).unpack(body, incoming)
    incoming.finish()
    return message


def _message_field(cls: type) -> Field | None:
    schema = _SCHEMAS.get(cls)
    if schema is None:
        return None

    def pack(value: Any, out: Outgoing) -> Any:
        if type(value) is not cls:
            raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")
        return schema.pack(value, out)

    return Field(schema.text, pack, schema.unpack, arrays=schema.arrays)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)

"""What travels and comes back equal, and what is refused with the field named."""

import math
from typing import Literal

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.protocol.arrays import DTYPES
from relax.protocol.codec import decode, encode, kind_of, message, schema_of
from relax.protocol.errors import EncodeError, Refused, SchemaError
from relax.protocol.frames import Limits, first_frame, split


@message
class Lot:
    number: int
    fence: int


@message
class Everything:
    name: str
    ratio: float
    raw: bytes
    flag: bool
    lot: Lot
    note: str | None
    runs: tuple[tuple[int, int], ...]
    counts: dict[str, int]
    why: Literal["stop", "length"]
    row: object
    tokens: np.ndarray
    extras: dict[str, np.ndarray]
    maybe: np.ndarray | None
    lots: tuple[Lot, ...] = ()


@message
class Numbers:
    a: int
    b: float


@message
class Vector:
    values: np.ndarray


def everything(**changes) -> Everything:
    values = {
        "name": "g",
        "ratio": 0.5,
        "raw": b"\0\1",
        "flag": True,
        "lot": Lot(3, 7),
        "note": None,
        "runs": ((0, 12), (1, 3)),
        "counts": {"x": 1},
        "why": "stop",
        "row": {"answer": [1, 2.5, None, "é"]},
        "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
        "extras": {"lp": np.zeros(4, np.float32), "big": np.arange(20000, dtype=np.float64)},
        "maybe": None,
        "lots": (Lot(1, 1), Lot(2, 2)),
    }
    return Everything(**(values | changes))


def opened(first: bytes) -> tuple[list, bytes]:
    """A first frame as the plain values of its header and the bytes behind it, for tampering."""
    values, small = split(first, 4, int.from_bytes(first[:4], "little"))
    return values, bytes(small)


def closed(values: list, small: bytes = b"") -> bytes:
    header = msgpack.packb(values)
    arrays = [np.frombuffer(small, np.uint8)] if small else []
    return first_frame(len(header).to_bytes(4, "little"), header, arrays)


def test_every_field_type_comes_back_equal():
    sent = everything()
    got = decode([bytes(f) for f in encode(sent)])
    for name in ("name", "ratio", "raw", "flag", "lot", "note", "runs", "counts", "why", "row", "maybe", "lots"):
        assert getattr(got, name) == getattr(sent, name), name
    assert got.tokens.dtype == np.int32 and np.array_equal(got.tokens, sent.tokens)
    assert list(got.extras) == ["lp", "big"] and np.array_equal(got.extras["big"], sent.extras["big"])


def test_small_arrays_share_the_header_and_large_ones_are_not_copied():
    big = np.arange(100_000, dtype=np.float32)
    frames = encode(Vector(big))
    assert len(frames) == 2 and np.shares_memory(frames[1], big)
    received = bytes(frames[1])
    got = decode([frames[0], received]).values
    assert np.shares_memory(got, np.frombuffer(received, np.uint8))
    assert len(encode(Vector(big[:100]))) == 1


def test_received_arrays_are_read_only_and_aligned():
    for size in (3, 50_000):
        frames = encode(Vector(np.arange(size, dtype=np.float64)))
        odd = [frames[0], *(memoryview(b"x" + bytes(f))[1:] for f in frames[1:])]
        got = decode(odd).values
        assert got.flags.aligned and not got.flags.writeable and got[2] == 2.0


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 4), max_size=4),
    step=st.sampled_from([1, 2, -1]),
)
@settings(max_examples=60, deadline=None)
def test_arrays_of_every_dtype_shape_and_stride_round_trip(dtype, shape, step):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(DTYPES[dtype])
    array = array[::step] if array.ndim else array
    got = decode(encode(Vector(array))).values
    assert got.dtype == array.dtype and got.shape == array.shape and np.array_equal(got, array)


def test_many_small_arrays_do_not_swell_the_header_without_bound():
    @message
    class Many:
        parts: tuple[np.ndarray, ...]

    frames = encode(Many(tuple(np.full(30_000, i, np.uint8) for i in range(40))))
    assert len(frames[0]) < 300_000 and len(frames) > 30
    assert [int(p[0]) for p in decode(frames).parts] == list(range(40))


def test_not_finite_floats_travel_as_they_are():
    got = decode(encode(Numbers(1, math.nan)))
    assert math.isnan(got.b) and decode(encode(Numbers(1, -math.inf))).b == -math.inf


def test_numpy_scalars_and_ints_for_floats_are_written_as_plain_numbers():
    got = decode(encode(Numbers(np.int64(3), 2)))  # type: ignore[arg-type]
    assert (type(got.a), got.a, type(got.b), got.b) == (int, 3, float, 2.0)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("name", 3, "field name: expected str, got int 3"),
        ("ratio", True, "field ratio: expected float, got bool True"),
        ("lot", (1, 2), "field lot: expected Lot, got tuple"),
        ("runs", ((0, 1), (0, "x")), r"field runs: \[1\]: \[1\]: expected int, got str 'x'"),
        ("counts", {1: 1}, "field counts: expected a dict with text keys"),
        ("why", "eos", "field why: expected one of 'stop', 'length', got 'eos'"),
        ("row", {"a": {1}}, "field row: set .1. is no plain data"),
        ("tokens", [1, 2], "field tokens: expected a numpy array, got list"),
        ("tokens", np.array(["a"]), "field tokens: arrays of dtype <U1 do not travel"),
        ("tokens", np.array([None]), "field tokens: arrays of dtype object do not travel"),
        ("tokens", np.zeros(2, ">i4"), "field tokens: arrays of dtype >i4 do not travel"),
        ("lot", Lot(1.5, 2), r"field lot.number: expected int, got float 1.5"),  # type: ignore[arg-type]
        ("lot", Lot(2**70, 2), "cannot send everything: Integer value out of range"),
    ],
)
def test_a_wrong_value_is_an_error_at_the_sender_naming_the_field(field, value, text):
    with pytest.raises(EncodeError, match=text):
        encode(everything(**{field: value}))


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        (lambda h: h.__setitem__(0, "nonsense"), "kind", "unknown message kind 'nonsense'"),
        (lambda h: h.__setitem__(0, ["x"]), "kind", "unknown message kind"),
        (lambda h: h.__setitem__(1, 5), "schema", "declared differently"),
        (lambda h: h[2].pop(), "type", "expected the 14 fields of everything"),
        (lambda h: h[2].__setitem__(0, 5), "type", "field name: expected str, got int 5"),
        (lambda h: h[2].__setitem__(1, 5), "type", "field ratio: expected float, got int 5"),
        (lambda h: h[2].__setitem__(3, 1), "type", "field flag: expected bool, got int 1"),
        (lambda h: h[2][4].__setitem__(1, "f"), "type", "field lot.fence: expected int"),
        (lambda h: h[2][6][1].__setitem__(0, None), "type", r"field runs\[1\]\[0\]: expected int, got NoneType"),
        (lambda h: h[2][7].__setitem__("x", 0.5), "type", r"field counts\['x'\]: expected int"),
        (lambda h: h[2].__setitem__(8, "eos"), "type", "field why"),
        (lambda h: h[2].__setitem__(9, msgpack.ExtType(3, b"x")), "header", "field header: .*extension type 3"),
        (lambda h: h[2].__setitem__(10, 1), "type", "field tokens: expected an array entry"),
        (lambda h: h[2][10].__setitem__(0, "O"), "array", "field tokens: dtype 'O'"),
        (lambda h: h[2][10].__setitem__(0, "M8"), "array", "field tokens: dtype 'M8'"),
        (lambda h: h[2][10].__setitem__(0, "f8"), "array", "takes 48 bytes, 40 came"),
        (lambda h: h[2][10].__setitem__(1, [2, 4]), "array", "field extras.'lp'.: expected an offset of 32, got 24"),
        (lambda h: h[2][10].__setitem__(1, [2, 2]), "array", "expected an offset of 16, got 24"),
        (lambda h: h[2][10].__setitem__(1, [-2, -3]), "array", "bad shape"),
        (lambda h: h[2][10].__setitem__(1, [2**40, 2**40, 0, 2**40]), "array", "field tokens: bad shape"),
        (lambda h: h[2][10].__setitem__(1, [0, 3]), "array", "field extras.'lp'.: expected an offset of 0, got 24"),
        (lambda h: h[2][10].__setitem__(1, [True, 6]), "array", "bad shape"),
        (lambda h: h[2][10].__setitem__(1, [1] * 9), "array", "bad shape"),
        (lambda h: h[2][10].__setitem__(2, None), "array", "field tokens: shape"),
        (lambda h: h[2][10].__setitem__(2, -8), "array", "field tokens: expected an offset of 0, got -8"),
        (lambda h: h[2][10].__setitem__(2, b"x"), "array", "field tokens: expected an offset of 0, got b'x'"),
        (lambda h: h[2][11]["big"].__setitem__(2, 40), "array", r"field extras\['big'\]: shape"),
        (lambda h: h[2][11].pop("lp"), "frames", "40 bytes came behind the header, it names 24"),
        (
            lambda h: h[2].__setitem__(12, ["i4", [1], None]),
            "frames",
            "field maybe: the header names more large arrays",
        ),
    ],
)
def test_a_tampered_header_is_refused_naming_sender_and_field(change, reason, text):
    frames = encode(everything())
    header, small = opened(frames[0])
    change(header)
    with pytest.raises(Refused, match=text) as refused:
        decode([closed(header, small), *frames[1:]], sender="rollout-1")
    assert refused.value.reason == reason and "from rollout-1" in str(refused.value)


def test_left_over_frames_are_refused():
    with pytest.raises(Refused, match="2 frames came, the header names 1"):
        decode([*encode(everything()), b"more"])


@pytest.mark.parametrize("header", [b"", b"\xc1", b"\x93\x01", b"\xdd\xff\xff\xff\xff", b"\x80", b"\x91" * 5000])
@pytest.mark.parametrize("length", [0, 1, 10_000])
def test_bytes_that_are_no_header_are_refused(header, length):
    with pytest.raises(Refused):
        decode([(length or len(header)).to_bytes(4, "little") + header])
    with pytest.raises(Refused):
        decode([header[:3]])


def test_a_boolean_array_with_other_bytes_is_refused():
    header, small = opened(encode(Vector(np.array([True, False])))[0])
    with pytest.raises(Refused, match="other than 0 and 1"):
        decode([closed(header, b"\x02" + small[1:])])


def test_limits_hold_at_the_sender_and_at_the_receiver():
    small = Limits(header_bytes=1000, frame_bytes=50_000, message_bytes=120_000, frames=2)
    frames = encode(Vector(np.zeros(60_000, np.uint8)))
    with pytest.raises(EncodeError, match="an array takes 60000 bytes, at most 50000"):
        encode(Vector(np.zeros(60_000, np.uint8)), small)
    with pytest.raises(Refused, match="frame 1: 60000 bytes came, at most 50000"):
        decode(frames, limits=small)
    with pytest.raises(Refused, match="more than 2 frames came"):
        decode([frames[0], b"", b"", b""], limits=small)
    with pytest.raises(EncodeError, match="the header takes"):
        encode(Vector(np.zeros(2000, np.uint8)), small)


@given(st.binary(max_size=80), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=400, deadline=None)
def test_noise_and_flipped_bytes_are_refused_or_read_but_never_crash(noise, at, value):
    frames = [bytes(f) for f in encode(everything())]
    flipped = bytearray(frames[0])
    flipped[at % len(flipped)] = value
    for header in (noise, bytes(flipped), frames[0][: at % len(frames[0])]):
        try:
            decode([header, *frames[1:]])
        except Refused:
            continue


def test_kinds_are_snake_case_and_taken_once():
    assert [kind_of(type(n, (), {})) for n in ("TrainBatch", "KLTerm", "Ask2")] == ["train_batch", "kl_term", "ask2"]
    with pytest.raises(SchemaError, match="kind 'lot'"):
        message(type("Lot", (), {"__annotations__": {"x": int}, "__module__": "elsewhere"}))


def test_the_fingerprint_follows_names_types_and_nested_messages():
    def made(name, **fields):
        return schema_of(message(type(name, (), {"__annotations__": fields, "__qualname__": name}))).fingerprint

    inner = message(type("InnerA", (), {"__annotations__": {"x": int}}))
    changed = message(type("InnerB", (), {"__annotations__": {"x": float}}))
    prints = {
        made("Probe", a=int, b=int),
        made("Probe", b=int, a=int),
        made("Probe", a=int, b=float),
        made("Probe", a=int, b=int | None),
        made("Probe", a=inner),
        made("Probe", a=changed),
    }
    assert len(prints) == 6 and made("Probe", a=int, b=int) in prints


@pytest.mark.parametrize("annotation", [list[int], set, complex, dict[int, int], int | str, "Nowhere"])
def test_a_field_that_cannot_travel_is_an_error_of_the_declaration(annotation):
    with pytest.raises(SchemaError):
        message(type("Impossible", (), {"__annotations__": {"x": annotation}}))


def test_messages_are_frozen_hashable_and_compare_by_value_unless_they_hold_arrays():
    assert Lot(1, 2) == Lot(1, 2) and len({Lot(1, 2), Lot(1, 2)}) == 1
    vector = Vector(np.zeros(3))
    assert vector == vector and vector != Vector(np.zeros(3)) and len({vector}) == 1
    with pytest.raises(AttributeError):
        Lot(1, 2).fence = 3  # type: ignore[misc]


def test_a_value_that_the_class_itself_rejects_is_refused_on_receipt():
    @message
    class Even:
        n: int

        def __post_init__(self) -> None:
            if self.n % 2:
                raise ValueError(f"n = {self.n} is odd")

    header, _ = opened(encode(Even(2))[0])
    header[2] = [3]
    with pytest.raises(Refused, match="n = 3 is odd"):
        decode([closed(header)])

"""Payloads: inline, pulled, released, and described wrongly."""

import numpy as np
import pytest

from relax.protocol.codec import decode, encode, message
from relax.protocol.errors import PayloadGone, PayloadStoreFull, PeerSilent, Refused
from relax.protocol.payload import Payload, PayloadStore
from tests.protocol.conftest import mailbox, opened, run


@message
class Handed:
    payload: Payload


def arrays(n: int) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(n, dtype=np.int32), "logprobs": np.full((n, 2), -0.5, np.float32)}


def over_the_wire(payload: Payload) -> Payload:
    return decode([bytes(f) for f in encode(Handed(payload))]).payload


def same(a, b) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize(("n", "inline"), [(10, True), (100_000, False)])
def test_arrays_come_back_equal_inline_when_small_and_pulled_when_large(bind, n, inline):
    async def work():
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        async with opened(a, b):
            producer, consumer = PayloadStore(a), PayloadStore(b)
            payload = over_the_wire(producer.put("g1", arrays(n)))
            assert (payload.arrays is not None) is inline and ("g1" in producer) is not inline
            assert payload.nbytes == n * 12
            for _ in range(2):  # the producer keeps it, whoever pulled before
                got = await consumer.fetch(payload, 10.0)
                assert same(got, arrays(n)) and not got["tokens"].flags.writeable
            assert same(await producer.fetch(payload, 10.0), arrays(n))

    run(work())


def test_a_released_payload_is_gone_and_frees_its_bytes(sockets):
    async def work():
        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        async with opened(a, b):
            producer, consumer = PayloadStore(a), PayloadStore(b)
            payload = producer.put("g1", arrays(50_000))
            assert producer.nbytes == 600_000 and len(producer) == 1
            assert producer.release("g1") and not producer.release("g1")
            assert producer.nbytes == 0
            for store in (producer, consumer):
                with pytest.raises(PayloadGone, match=rf"payload g1 is not at its producer {a.endpoint}"):
                    await store.fetch(payload, 10.0)

    run(work())


def test_putting_an_id_again_replaces_it_and_the_store_is_bounded(sockets):
    async def work():
        a = mailbox("a", f"ipc://{sockets}/a")
        async with opened(a):
            store = PayloadStore(a, inline_limit=100, store_limit=2500)
            store.put("g1", arrays(100))
            payload = store.put("g1", arrays(200))
            assert store.nbytes == 2400 and same(await store.fetch(payload, 1.0), arrays(200))
            with pytest.raises(PayloadStoreFull, match="payload g2 takes 1200 bytes; 2400 of at most 2500"):
                store.put("g2", arrays(100))
            store.put("g1", arrays(5))
            assert store.nbytes == 0

    run(work())


def test_arrays_that_differ_from_their_description_are_refused(sockets):
    async def work():
        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        async with opened(a, b):
            producer, consumer = PayloadStore(a, inline_limit=0), PayloadStore(b)
            payload = producer.put("g1", arrays(10))
            producer.put("g1", arrays(11))
            with pytest.raises(Refused, match="payload g1 was described as"):
                await consumer.fetch(payload, 10.0)

    run(work())


def test_a_producer_that_is_gone_is_silent_at_the_deadline(sockets):
    async def work():
        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        async with opened(a, b):
            producer, consumer = PayloadStore(a, inline_limit=0), PayloadStore(b)
            payload = producer.put("g1", arrays(10))
            a.abort()
            with pytest.raises(PeerSilent, match="did not answer fetch_payload"):
                await consumer.fetch(payload, 0.3)

    run(work())


def test_an_inline_payload_needs_no_store():
    payload = Payload.inline(arrays(3))
    assert payload.arrays is not None and same(over_the_wire(payload).arrays, arrays(3))


@pytest.mark.parametrize(("n", "inline"), [(10, True), (100_000, False)])
def test_what_is_kept_can_be_pulled_later_however_small_and_travels_inline_when_small(bind, n, inline):
    async def work():
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        async with opened(a, b):
            producer, consumer = PayloadStore(a), PayloadStore(b)
            kept = producer.keep("g1", arrays(n))
            assert kept.arrays is None and producer.nbytes == n * 12
            assert (producer.travelling(kept).arrays is not None) is inline
            for store in (producer, consumer):
                assert same(await store.fetch(over_the_wire(kept), 10.0), arrays(n))
            producer.release("g1")
            with pytest.raises(PayloadGone):
                await consumer.fetch(kept, 10.0)

    run(work())

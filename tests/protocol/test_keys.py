"""Connections with keys: who gets in, who is refused, what both sides are told."""

import asyncio

import pytest
import structlog
import zmq

from relax.config.keys import KeyProblem, read_secret, write_secret
from relax.protocol.errors import PeerSilent
from relax.protocol.handshakes import lately_closed
from relax.protocol.security import Keys, Security
from tests.protocol.conftest import mailbox, opened, run, until
from tests.protocol.wire import Note, Question, Reply

TCP = "tcp://127.0.0.1:0"


def keys() -> Keys:
    return Keys.of(zmq.curve_keypair()[1].decode())


OURS, THEIRS = keys(), keys()


async def double(message, sender):
    return Reply(2 * message.number)


async def ignore(message, sender):
    pass


def serving(security):
    b = mailbox("b", TCP, security=security)
    b.on(Question, double)
    b.on(Note, ignore)
    return b


def test_mailboxes_with_the_same_keys_talk():
    async def work():
        a, b = mailbox("a", TCP, security=Security(keys=OURS)), serving(Security(keys=OURS))
        async with opened(a, b):
            assert await a.ask(b.endpoint, Question(21), 10.0) == Reply(42)
            for i in range(300):
                await a.tell(b.endpoint, Note(i), 10.0)
            assert b.counters["refused_connections"] == 0 and a.counters["failed_connections"] == 0
            await a.close()
            await b.close()

    run(work())


@pytest.mark.parametrize(
    ("there", "here", "reason", "told"),
    [
        ({"keys": THEIRS}, {"keys": OURS}, "the two sides have different keys", "the connection was closed"),
        ({}, {"keys": OURS}, "one side speaks plain text", "one side speaks plain text"),
        ({"keys": THEIRS}, {}, "one side speaks plain text", "one side speaks plain text"),
    ],
    ids=["another-key", "plain-text-against-keys", "keys-against-plain-text"],
)
def test_a_peer_without_the_key_is_refused_and_both_sides_say_why(there, here, reason, told):
    async def work():
        good = mailbox("good", TCP, security=Security(**here))
        a, b = mailbox("a", TCP, security=Security(**there)), serving(Security(**here))
        with structlog.testing.capture_logs() as logs:
            async with opened(a, b, good):
                with pytest.raises(PeerSilent, match=f"nothing was ever heard from it; .* failed: {told}"):
                    await a.ask(b.endpoint, Question(1), 0.6)
                await until(lambda: any(r["event"] == "connection_refused" for r in logs))
                assert b.counters["received"] == b.counters["refused"] == 0
                assert await good.ask(b.endpoint, Question(1), 10.0) == Reply(2)
        refused = next(r for r in logs if r["event"] == "connection_refused")
        assert refused["peer"] == "127.0.0.1" and reason in refused["reason"]
        assert any(r["event"] == "connection_failed" and b.endpoint in r["peer"] for r in logs)

    run(work())


def test_reasons_that_come_together_are_all_told_and_a_member_that_left_is_not_blamed():
    async def work():
        b, plain = serving(Security(keys=OURS)), mailbox("plain", TCP, security=Security())
        member = mailbox("member", TCP, security=Security(keys=OURS))
        foreign = mailbox("foreign", TCP, security=Security(keys=THEIRS))
        with structlog.testing.capture_logs() as logs:
            async with opened(b, plain, foreign, member):
                assert await member.ask(b.endpoint, Question(1), 10.0) == Reply(2)
                await member.close()
                await asyncio.sleep(0.3)
                assert not [r for r in logs if r["event"] == "connection_refused"]
                assert not lately_closed(int(b.endpoint.rpartition(":")[2]))
                for intruder in (plain, foreign):
                    intruder.tell_nowait(b.endpoint, Note(1))

                def told(text: str) -> bool:
                    return any(text in r["reason"] for r in logs if r["event"] == "connection_refused")

                await until(lambda: told("plain text") and told("different keys"))
        assert {r["peer"] for r in logs if r["event"] == "connection_refused"} == {"127.0.0.1"}

    run(work())


def test_the_public_key_alone_lets_nobody_in():
    async def work():
        b = serving(Security(keys=OURS))
        with structlog.testing.capture_logs() as logs:
            async with opened(b):
                raw = zmq.Context.instance().socket(zmq.DEALER)
                raw.curve_publickey, raw.curve_secretkey = THEIRS.public, THEIRS.secret
                raw.curve_serverkey = OURS.public
                raw.connect(b.endpoint)
                await until(lambda: b.counters["refused_connections"] > 0)
                raw.close(linger=0)
        (refused,) = [r for r in logs if r["event"] == "connection_refused"]
        assert refused["peer"] == "127.0.0.1" and "is not the key of this run" in refused["reason"]

    run(work())


def test_who_is_refused_hears_nothing_of_the_run():
    """However a stranger begins, a mailbox with keys sends nothing but the greeting of ZeroMQ."""

    async def work():
        b = serving(Security(keys=OURS))
        async with opened(b):
            port = int(b.endpoint.rpartition(":")[2])
            null = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
            curve = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15 + 32)
            heard = b""
            for begin in (b"GET / HTTP/1.1\r\n\r\n" * 8, null, curve, curve + b"\x04\xc8\x05HELLO" + bytes(194)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begin)
                try:
                    async with asyncio.timeout(0.5):
                        while some := await reader.read(100_000):
                            heard += some
                except (TimeoutError, ConnectionError):
                    pass
                writer.close()
            assert b"CURVE" in heard  # the mechanism is all that ZMTP's greeting says
            for secret in (b"run", b"b-a", b"relax", b"Rx", OURS.public, OURS.secret):
                assert secret not in heard
            assert b.counters["received"] == 0

    run(work())


def test_doorkeepers_come_and_go_with_their_mailboxes():
    async def work():
        for _ in range(3):
            a, b = mailbox("a", TCP, security=Security(keys=OURS)), serving(Security(keys=OURS))
            c, d = mailbox("c", TCP, security=Security(keys=THEIRS)), serving(Security(keys=THEIRS))
            async with opened(a, b, c, d):
                assert await a.ask(b.endpoint, Question(1), 10.0) == Reply(2)
                a.abort()
                b.abort()
                assert await c.ask(d.endpoint, Question(2), 10.0) == Reply(4)

    run(work())


def test_the_secret_is_in_no_text():
    assert OURS.secret.decode() not in f"{OURS} {OURS!r} {Security(keys=OURS)!r}"


def test_keys_and_plain_text_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        Security(insecure=True, keys=OURS)


def test_a_written_secret_is_read_back_and_never_overwritten(tmp_path):
    secret = OURS.secret.decode()
    file = write_secret(tmp_path / "new" / "keys", secret)
    assert oct(file.stat().st_mode)[-3:] == "600" and oct(file.parent.stat().st_mode)[-3:] == "700"
    assert read_secret(file.parent) == secret and Keys.load(file.parent) == OURS
    with pytest.raises(KeyProblem, match="is there already"):
        write_secret(file.parent, secret)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o700])
def test_a_secret_that_others_can_use_is_refused(tmp_path, mode):
    file = write_secret(tmp_path / "keys", OURS.secret.decode())
    file.chmod(mode)
    if mode == 0o700:
        assert Keys.load(file.parent) == OURS
        return
    with pytest.raises(KeyProblem, match=f"can be used by others .mode {mode:o}.*chmod 600 {file}"):
        Keys.load(file.parent)


def test_keys_that_cannot_be_are_refused_with_what_to_do(tmp_path):
    directory = tmp_path / "keys"
    with pytest.raises(KeyProblem, match=r"is not there.*relax-launch --keygen"):
        read_secret(directory)
    file = write_secret(directory, OURS.secret.decode())
    directory.chmod(0o770)
    with pytest.raises(KeyProblem, match=r"can be written by others .*chmod 700"):
        read_secret(directory)
    with pytest.raises(KeyProblem, match="can be written by others"):
        write_secret(directory, OURS.secret.decode())
    directory.chmod(0o700)
    for text in ("", "short\n", f"{OURS.secret.decode()}\n{OURS.secret.decode()}\n", "ä" * 40):
        file.write_text(text)
        with pytest.raises(KeyProblem, match="holds no secret key"):
            read_secret(directory)
    file.unlink()
    file.mkdir()
    with pytest.raises(KeyProblem, match="is no file"):
        read_secret(directory)
    (tmp_path / "file").touch()
    with pytest.raises(KeyProblem, match="is no directory"):
        write_secret(tmp_path / "file", OURS.secret.decode())


def test_addresses_of_closed_connections_are_read_from_the_kernels_tables(tmp_path):
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue\n"
        "   0: 0100007F:1388 0200007F:96F4 06 00000000:00000000\n"
        "   1: 0100007F:1388 0300007F:96F4 01 00000000:00000000\n"
        "   5: 0100007F:1388 0600007F:96F4 09 00000000:00000000\n"
        "   2: 0100007F:1389 0400007F:96F4 06 00000000:00000000\n"
        "   3: 0000000000000000FFFF00000100007F:1388 0000000000000000FFFF00000500007F:96F4 06 00000000:00000000\n"
        "   4: 00000000000000000000000001000000:1388 00000000000000000000000001000000:96F4 05 00000000:00000000\n"
    )
    closed = lately_closed(5000, (table, tmp_path / "missing"))
    assert closed == {(address, 0x96F4) for address in ("127.0.0.2", "127.0.0.5", "::1")}

#!/usr/bin/env python3
"""What the protocol and the controller cost, beside raw sockets on the same frames.

Mailboxes against raw pyzmq asyncio between two processes over ipc: messages/s, MB/s and their ratio for groups of three
arrays of 8 samples x T tokens, and the round trip of an ask against a raw echo (p50, p99). The mailbox delivers with
acknowledgements, the raw sockets without. Then a real controller (its gate, ledger, files and sockets) against stages
that answer at once: groups/s, and the share of one core that its process needs for 1,000 groups/s. Everything is
measured in rounds, one after the other; shown is the median. Ratios and shares carry over between machines, absolute
figures do not. benchmarks/controller.py says how the cost of a group grows with the replicas and the open groups.

    .venv/bin/python benchmarks/protocol.py [--rounds 9] [--seconds 0.3] [--batches 30]
"""

import argparse
import asyncio
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import structlog
import uvloop
import zmq
import zmq.asyncio
from stages import Cost, controller_cost

from relax.protocol.codec import decode, encode, message
from relax.protocol.errors import PeerSilent
from relax.protocol.mailbox import Mailbox

TOKENS = {"1.5 kB": 16, "49 kB": 512, "1.6 MB": 16384}
DEADLINE = 60.0
ECHOES = 200
GROUPS = 128
REPLICAS = (4, 64)


@message
class Group:
    number: int
    attempt: int
    version: int
    name: str
    tokens: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray


@message
class Echo:
    number: int


def group(tokens: int) -> Group:
    values = np.random.default_rng(0).standard_normal((8, tokens)).astype(np.float32)
    return Group(12345, 0, 42, "rollout-3", values.astype(np.int32), values, values)


def mailbox(name: str, directory: str) -> Mailbox:
    return Mailbox(name, run_id="benchmark", lineage=0, incarnation="1", bind=f"ipc://{directory}/{name}")


async def receive(directory: str) -> None:
    """The other process: a mailbox that takes groups and echoes, and a raw ROUTER doing the same, until told `end`."""
    box = mailbox("receiver", directory)

    async def take(message: Group, sender: object) -> None:
        assert message.tokens.shape == message.logprobs.shape

    async def echo(message: Echo, sender: object) -> Echo:
        return message

    box.on(Group, take)
    box.on(Echo, echo)
    await box.start()
    router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{directory}/raw")
    print("ready", flush=True)
    while True:
        route, flag, *frames = await router.recv_multipart(copy=False)
        if flag.bytes == b"end":
            break
        if flag.bytes == b"echo":
            await router.send_multipart([route, *frames], copy=False)
            continue
        got = decode([frames[0].bytes, *frames[1:]])
        assert got.tokens.shape == got.logprobs.shape
        if flag.bytes == b"last":
            await router.send_multipart([route, b"done"])
    router.close(linger=0)
    box.abort()


async def raw_throughput(socket: zmq.asyncio.Socket, sent: Group, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        await socket.send_multipart([b"group", *encode(sent)], copy=False)
        count += 1
    await socket.send_multipart([b"last", *encode(sent)], copy=False)
    await asyncio.wait_for(socket.recv(), DEADLINE)
    return (count + 1) / (time.perf_counter() - start)


async def mailbox_throughput(box: Mailbox, to: str, sent: Group, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        try:
            box.tell_nowait(to, sent)
        except PeerSilent:  # the window is full
            await box.tell(to, sent, DEADLINE)
        count += 1
    await box.tell(to, sent, DEADLINE)
    return (count + 1) / (time.perf_counter() - start)


async def raw_latency(socket: zmq.asyncio.Socket, times: int) -> list[float]:
    taken = []
    for i in range(times):
        start = time.perf_counter()
        await socket.send_multipart([b"echo", *encode(Echo(i))])
        decode(await asyncio.wait_for(socket.recv_multipart(), DEADLINE))
        taken.append(1e6 * (time.perf_counter() - start))
    return taken


async def mailbox_latency(box: Mailbox, to: str, times: int) -> list[float]:
    taken = []
    for i in range(times):
        start = time.perf_counter()
        await box.ask(to, Echo(i), DEADLINE)
        taken.append(1e6 * (time.perf_counter() - start))
    return taken


async def measure(directory: str, rounds: int, seconds: float, batches: int) -> None:
    box = mailbox("sender", directory)
    await box.start()
    to = f"ipc://{directory}/receiver"
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{directory}/raw")
    groups = {label: group(tokens) for label, tokens in TOKENS.items()}
    raws: dict[str, list[float]] = {label: [] for label in TOKENS}
    boxes: dict[str, list[float]] = {label: [] for label in TOKENS}
    echoes: dict[str, list[np.ndarray]] = {"raw echo": [], "ask": []}
    costs: dict[int, list[Cost]] = {replicas: [] for replicas in REPLICAS}
    for number in range(rounds):
        for label, sent in groups.items():
            raws[label].append(await raw_throughput(socket, sent, seconds))
            boxes[label].append(await mailbox_throughput(box, to, sent, seconds))
        echoes["raw echo"].append(np.percentile(await raw_latency(socket, ECHOES), [50, 99]))
        echoes["ask"].append(np.percentile(await mailbox_latency(box, to, ECHOES), [50, 99]))
        for replicas in costs:
            place = Path(directory) / f"run-{number}-{replicas}"
            costs[replicas].append(await asyncio.to_thread(controller_cost, place, batches, GROUPS, replicas))
    print(f"{'group':>8} {'raw msg/s':>10} {'mailbox':>10} {'ratio':>6} {'raw MB/s':>9} {'mailbox':>9}")
    for label, tokens in TOKENS.items():
        ratio = statistics.median(b / r for b, r in zip(boxes[label], raws[label], strict=True))
        raw, own, mb = statistics.median(raws[label]), statistics.median(boxes[label]), 8 * tokens * 12 / 1e6
        print(f"{label:>8} {raw:10,.0f} {own:10,.0f} {ratio:6.2f} {raw * mb:9,.0f} {own * mb:9,.0f}")
    for name, rows in echoes.items():
        p50, p99 = np.median(rows, axis=0)
        print(f"{name:>8}: p50 {p50:.0f} us, p99 {p99:.0f} us")
    for replicas, runs in costs.items():
        speed = statistics.median(cost.groups / cost.seconds for cost in runs)
        share = statistics.median(1000 * cost.cpu_seconds / cost.groups for cost in runs)
        print(f"controller, {replicas} replicas: {speed:,.0f} groups/s, {share:.2f} of a core for 1,000 groups/s")
    print(f"counters: {dict(box.counters)}")
    await socket.send(b"end")
    await box.close()
    socket.close(linger=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--batches", type=int, default=30, help=f"of {GROUPS} groups in a run of the controller")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        uvloop.run(receive(options.receive))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory(prefix="rx-") as directory:
        command = [sys.executable, str(Path(__file__).resolve()), "--receive", directory]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            child.stdout.readline()
            uvloop.run(measure(directory, options.rounds, options.seconds, options.batches))
            child.wait(10)
        finally:
            child.kill()


if __name__ == "__main__":
    main()

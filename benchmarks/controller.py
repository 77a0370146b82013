"""What a group costs the controller, without its sockets, and how that grows with the replicas and the open groups.

    .venv/bin/python benchmarks/controller.py

Real gate, book, ledger (its writer thread included) and turns; what is sent is kept in a list. Seconds are CPU seconds
of this process, so that other work on the machine does not count. A group must cost the same whatever is open: the
ratios are to the first run. With one turn for many reports, as the controller does under load, it costs less.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "services"))

from desk import Desk, desk, sender

from relax.protocol.messages import Generate, GroupOrder, Lease, Ready, RewardDone

# (batches, groups of a batch, replicas, groups reported between two turns)
RUNS = [(30, 128, 4, 1), (30, 128, 4, 16), (8, 512, 4, 16), (8, 512, 128, 16), (3, 2048, 1024, 16)]


def report(it: Desk, order: GroupOrder) -> None:
    """All that the stages say of one group."""
    lease, version = order.lease, it.book[order.lease.group].version or 0
    it.sampled(lease, version)
    it.groups.reward_done(RewardDone(lease, it.peers.of_role("advantages")[0].incarnation), sender("reward-0"))
    it.groups.ready(Ready(lease, version, 5), sender("advantages-0"))


def train(it: Desk, batch: int) -> None:
    it.started(batch)
    it.trained(batch)
    it.published(batch + 1)
    for replica in list(it.replicas):
        running = tuple(Lease(group, 0, 0, fence) for group, fence in replica.samples.items())
        it.serves(replica.member.name, batch + 1, credit=16, running=running)


def seconds_a_group(folder: Path, batches: int, groups: int, replicas: int, together: int) -> float:
    it = desk(
        folder,
        prompts=(batches + 4) * groups,
        rollouts=replicas,
        rollout_batch_size=groups,
        num_rollout=batches,
        max_staleness=2,
        use_tis=True,
    )
    for replica in list(it.replicas):
        it.serves(replica.member.name, 0, credit=16)
    waiting: list[GroupOrder] = []
    start = time.process_time()
    while not it.spawned:
        it.turn()
        waiting += [order for _, message in it.take(Generate) for order in message.orders]
        for order in waiting[:together]:
            report(it, order)
        waiting = waiting[together:]
        it.turn()
        waiting += it.orders()
        for assemble in it.committed():
            train(it, assemble.batch)
        it.sent = [(to, message) for to, message in it.sent if isinstance(message, Generate)]
    seconds = time.process_time() - start
    it.ledger.close()
    return seconds / (batches * groups)


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    first = None
    print("batches  groups  replicas  a turn  us/group  groups/s  ratio")
    for batches, groups, replicas, together in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            cost = seconds_a_group(Path(folder), batches, groups, replicas, together)
        first = first or cost
        speed = f"{cost * 1e6:8.0f}  {1 / cost:8,.0f}  {cost / first:5.2f}"
        print(f"{batches:7}  {groups:6}  {replicas:8}  {together:6}  {speed}")


if __name__ == "__main__":
    main()

"""How rank 0 of a service leads the others: it names a command and its arguments, every rank runs the same method.

A service of several ranks (actor, critic, reference) has a *work*: a class whose commands are collective. Rank 0 holds
the mailbox, builds the work through `Ranks` and runs its commands; the other ranks `follow`.

Every command belongs to a *lane*. In a lane all ranks do one command after the other, in the order in which rank 0
gives them; lanes go on beside each other, since each has a thread on every rank and a process group of its own. When a
command is over on rank 0 it is over on all ranks, so one lane may use what another one has finished. The collectives
inside commands of different lanes must be in different groups too: that is up to the work.
"""

import asyncio
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
import torch.distributed as dist

from relax.config.options import Options
from relax.launch.process import die_with_parent
from relax.megatron import exchange, parallel
from relax.services.service import Context

# How often a leader without work says so. Followers wait for a command no longer than LOST_SECONDS.
IDLE_SECONDS = 5.0
LOST_SECONDS = 300.0

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

MODEL = "model"
"""The lane of what computes with the live model; its thread is the one that built it."""

_LANE = "lane_of_all_ranks"


def in_lane(lane: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Marks a method of a work that rank 0 may run on all ranks, in `lane`.

    Its arguments are JSON values, or dicts of numpy arrays with one name for each array in all of them. What it returns
    counts on rank 0 alone; an iterator is exhausted on every rank.
    """

    def mark(method: Callable[P, T]) -> Callable[P, T]:
        setattr(method, _LANE, lane)
        return method

    return mark


command = in_lane(MODEL)


class Leader(Generic[W]):
    """Rank 0's hand on all ranks. What is done in a lane belongs to the one thread of that lane."""

    def __init__(self, build: Callable[Concatenate[Options, P], W], options: Options, *args: P.args, **kw: P.kwargs):
        """Joins the grid of `options` and builds the work on all ranks: `build(options, ...)`, JSON values beside."""
        self._lanes = _join(build, options)
        self._streaming: dict[str, str] = {}  # lane -> the command whose items are being taken
        self._tell(MODEL, "build", *args, **kw)
        self.work = build(options, *args, **kw)

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(self._lanes)

    def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`method` of the work, on all ranks. Raises TypeError when it is no command.

        After an InStepError of the method the lane goes on; any other error leaves the ranks out of step.
        """
        name, lane = getattr(method, "__name__", repr(method)), lane_of(method)
        self._tell(lane, name, *args, **kwargs)
        try:
            result = method(*args, **kwargs)
        except exchange.InStepError:
            _over(self._lanes[lane])
            raise
        if isinstance(result, Iterator):
            self._streaming[lane] = name  # from now on, and not only from the first item: the others are in it already
            return self._whole(lane, result)  # type: ignore[return-value]
        _over(self._lanes[lane])
        return result

    def idle(self, lane: str = MODEL) -> None:
        """Nothing to do yet: the others go on waiting."""
        self._tell(lane, "idle")

    def end(self, lane: str = MODEL) -> None:
        self._tell(lane, "end")

    def _tell(self, lane: str, name: str, *args: Any, **kwargs: Any) -> None:
        if lane in self._streaming:
            raise RuntimeError(
                f"{name} follows {self._streaming[lane]}, whose result was not taken whole: the ranks are in it"
            )
        arrays: dict[str, np.ndarray] = {}
        given = [_take(value, arrays) for value in args]
        named = {key: _take(value, arrays) for key, value in kwargs.items()}
        exchange.broadcast({"do": name, "args": given, "kwargs": named}, arrays, self._lanes[lane])

    def _whole(self, lane: str, items: Iterator[Any]) -> Iterator[Any]:
        yield from items
        _over(self._lanes[lane])
        del self._streaming[lane]


def lane_of(method: Callable[..., Any]) -> str:
    """The lane of a command. Raises TypeError when `method` is none."""
    lane = getattr(method, _LANE, None)
    if lane is None:
        name = getattr(method, "__name__", repr(method))
        raise TypeError(f"{name} is no command of the ranks: mark it with @command or @in_lane")
    return lane


def _join(build: Any, options: Options) -> dict[str, dist.ProcessGroup | None]:
    """Joins the grid; the lanes of a work, the model's first, each with the group in which its commands are told."""
    grid = parallel.initialize(options, timeout=LOST_SECONDS)
    marked = {getattr(getattr(build, name), _LANE, MODEL) for name in dir(build)}
    return {lane: parallel.new_group() if grid.world > 1 else None for lane in (MODEL, *sorted(marked - {MODEL}))}


def _over(group: dist.ProcessGroup | None) -> None:
    """Returns when every rank is here."""
    if group is not None:
        dist.barrier(group)


def _take(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The argument as it stands in the header; its arrays travel beside."""
    if not isinstance(value, dict):
        return {"value": value}
    arrays |= value
    return {"arrays": list(value)}


def _give(told: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    return told["value"] if "value" in told else {name: arrays[name] for name in told["arrays"]}


def follow(build: Callable[..., Any], options: Options) -> None:
    """The life of every rank but the first: build, then obey until told to end. A silent leader is an error of the
    collective."""
    lanes = _join(build, options)
    _, args, kwargs = _hear(lanes[MODEL])
    work = build(options, *args, **kwargs)
    beside = [
        threading.Thread(target=_obey_or_fall, args=(work, group), name=lane, daemon=True)
        for lane, group in lanes.items()
        if lane != MODEL
    ]
    for thread in beside:
        thread.start()
    _obey(work, lanes[MODEL])
    for thread in beside:
        thread.join()


def _hear(group: dist.ProcessGroup | None) -> tuple[str, list[Any], dict[str, Any]]:
    header, arrays = exchange.broadcast(None, group=group)
    args = [_give(value, arrays) for value in header["args"]]
    return header["do"], args, {key: _give(value, arrays) for key, value in header["kwargs"].items()}


def _obey(work: Any, group: dist.ProcessGroup | None) -> None:
    """The life of a lane."""
    while True:
        name, args, kwargs = _hear(group)
        if name == "end":
            return
        if name == "idle":
            continue
        with suppress(exchange.InStepError):  # rank 0 raises it too, and tells
            result = getattr(work, name)(*args, **kwargs)
            if isinstance(result, Iterator):
                for _ in result:
                    pass
        _over(group)


def _obey_or_fall(work: Any, group: dist.ProcessGroup | None) -> None:
    """A lane that fails ends its process, whose other lanes may wait in a collective for minutes."""
    try:
        _obey(work, group)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def follow_run(context: Context, path: str) -> int:
    """A rank without a mailbox from start to end; returns its exit code. `path` is the work's module:class."""
    die_with_parent()
    follow(resolve_name(path), context.model_options)
    return 0


class Ranks(Generic[W]):
    """The leader behind an event loop: a thread for each lane, where commands run one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads = {MODEL: ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{MODEL}")}
        self._leader: Leader[W] | None = None

    async def build(
        self, build: Callable[Concatenate[Options, P], W], options: Options, *args: P.args, **kwargs: P.kwargs
    ) -> W:
        """The work, built on all ranks; see `Leader`."""
        self._leader = await self._in_lane(MODEL, partial(Leader, build, options, *args, **kwargs))
        for lane in self._leader.lanes[1:]:
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-{lane}")
        return self._leader.work

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A command of the work, see `Leader.run`. Not for one that gives an iterator: that is for `lead`."""
        return await self.lead(lambda leader: leader.run(method, *args, **kwargs), lane_of(method))

    async def lead(self, act: Callable[[Leader[W]], T], lane: str = MODEL) -> T:
        """`act` on the thread of `lane`, which it has to itself until it returns."""
        assert self._leader is not None, "the work is not built yet"
        return await self._in_lane(lane, partial(act, self._leader))

    async def keep(self) -> None:
        """Tells the other ranks now and then that rank 0 lives, until cancelled."""
        try:
            async with asyncio.TaskGroup() as lanes:
                for lane in self._threads:
                    lanes.create_task(self._keep(lane))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the cause is what its user reads

    async def _keep(self, lane: str) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS)
            await self.lead(lambda leader: leader.idle(lane), lane)

    async def close(self, clean: bool) -> None:
        """Lets the other ranks end when `clean`; otherwise they fall with this one."""
        if clean and self._leader is not None:
            await asyncio.gather(*(self.lead(partial(Leader.end, lane=lane), lane) for lane in self._leader.lanes))
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    async def _in_lane(self, lane: str, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[lane], work)

"""How rank 0 of a service leads the others: it names a command and its arguments, every rank runs the same method.

A service of several ranks (actor, critic, reference) has a *work*: a class whose commands are collective. Rank 0 holds
the mailbox, builds the work through `Ranks` and runs its commands; the other ranks `follow`.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np

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

_MARK = "runs_on_all_ranks"


def command(method: Callable[P, T]) -> Callable[P, T]:
    """Marks a method of a work that rank 0 may run on all ranks.

    Its arguments are JSON values, or dicts of numpy arrays with one name for each array in all of them. What it returns
    counts on rank 0 alone; an iterator is exhausted on every rank.
    """
    setattr(method, _MARK, True)
    return method


class Leader(Generic[W]):
    """Rank 0's hand on all ranks. Belongs to the one thread that touches the model."""

    def __init__(self, build: Callable[Concatenate[Options, P], W], options: Options, *args: P.args, **kw: P.kwargs):
        """Joins the grid of `options` and builds the work on all ranks: `build(options, ...)`, JSON values beside."""
        parallel.initialize(options, timeout=LOST_SECONDS)
        self._streaming: str | None = None
        self._tell("build", *args, **kw)
        self.work = build(options, *args, **kw)

    def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`method` of the work, on all ranks. Raises TypeError when it is no command."""
        name = getattr(method, "__name__", repr(method))
        if not hasattr(method, _MARK):
            raise TypeError(f"{name} is no command of the ranks: mark it with @command")
        self._tell(name, *args, **kwargs)
        result = method(*args, **kwargs)
        if isinstance(result, Iterator):
            self._streaming = name  # from now on, and not only from the first item: the others are in it already
            return self._whole(result)  # type: ignore[return-value]
        return result

    def idle(self) -> None:
        """Nothing to do yet: the others go on waiting."""
        self._tell("idle")

    def end(self) -> None:
        self._tell("end")

    def _tell(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._streaming is not None:
            raise RuntimeError(
                f"{name} follows {self._streaming}, whose result was not taken whole: the ranks are in it"
            )
        arrays: dict[str, np.ndarray] = {}
        given = [_take(value, arrays) for value in args]
        named = {key: _take(value, arrays) for key, value in kwargs.items()}
        exchange.broadcast({"do": name, "args": given, "kwargs": named}, arrays)

    def _whole(self, items: Iterator[Any]) -> Iterator[Any]:
        yield from items
        self._streaming = None


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
    parallel.initialize(options, timeout=LOST_SECONDS)
    work: Any = None
    while True:
        header, arrays = exchange.broadcast(None)
        args = [_give(value, arrays) for value in header["args"]]
        kwargs = {key: _give(value, arrays) for key, value in header["kwargs"].items()}
        match header["do"]:
            case "build":
                work = build(options, *args, **kwargs)
            case "idle":
                pass
            case "end":
                return
            case name:
                result = getattr(work, name)(*args, **kwargs)
                if isinstance(result, Iterator):
                    for _ in result:
                        pass


def follow_run(context: Context, path: str) -> int:
    """A rank without a mailbox from start to end; returns its exit code. `path` is the work's module:class."""
    die_with_parent()
    module, _, name = path.partition(":")
    follow(getattr(import_module(module), name), context.model_options)
    return 0


class Ranks(Generic[W]):
    """The leader behind an event loop: one thread that touches the model, where commands run one after the other."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._leader: Leader[W] | None = None

    async def build(
        self, build: Callable[Concatenate[Options, P], W], options: Options, *args: P.args, **kwargs: P.kwargs
    ) -> W:
        """The work, built on all ranks; see `Leader`."""
        self._leader = await self._on_thread(partial(Leader, build, options, *args, **kwargs))
        return self._leader.work

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A command of the work, see `Leader.run`. Not for one that gives an iterator: that is for `lead`."""
        return await self.lead(lambda leader: leader.run(method, *args, **kwargs))

    async def lead(self, act: Callable[[Leader[W]], T]) -> T:
        """`act` on the model's thread, which it has to itself until it returns."""
        assert self._leader is not None, "the work is not built yet"
        return await self._on_thread(partial(act, self._leader))

    async def keep(self) -> None:
        """Tells the other ranks now and then that rank 0 lives, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_SECONDS)
            await self.lead(Leader.idle)

    async def close(self, clean: bool) -> None:
        """Lets the other ranks end when `clean`; otherwise they fall with this one."""
        if clean and self._leader is not None:
            await self.lead(Leader.end)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

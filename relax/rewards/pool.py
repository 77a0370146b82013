"""A pool of worker processes that score samples, each killed and replaced when a sample runs over the time limit."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from relax.rewards.child import Child, ChildDiedError, RewardPoolError
from relax.rewards.score import Failure, FailureKind, Item, Score
from relax.rewards.spec import VerifierSpec

# A worker that dies under a sample may have been killed from outside; one that dies twice was killed by the sample.
_ATTEMPTS = 2


class RewardPool:
    """`workers` warm child processes; `timeout` is in seconds a sample, counted from a warm worker.

    `score` may be called from many tasks of one event loop; `backlog` bounds the samples that wait. `counters` holds
    scored, abstained, failed_<kind> and restarts. A pool that can no longer score raises RewardPoolError from `score`.
    Workers die with the thread that called `start`, also when the process is killed.
    """

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        workers: int = 1,
        timeout: float = 10.0,
        startup_timeout: float = 60.0,
        backlog: int = 1024,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._spec, self._workers, self._timeout, self._startup_timeout = spec, workers, timeout, startup_timeout
        self._queue: asyncio.Queue[tuple[Item, asyncio.Future[Score]]] = asyncio.Queue(backlog)
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Starts the workers and returns when all are warm. Raises RewardPoolError, leaving no process behind."""
        results = await asyncio.gather(*(self._start_child() for _ in range(self._workers)), return_exceptions=True)
        children = [result for result in results if isinstance(result, Child)]
        for result in results:
            if isinstance(result, BaseException):
                await asyncio.gather(*(child.kill() for child in children))
                raise result
        for child in children:
            task = asyncio.create_task(self._serve(child), name="reward-worker")
            task.add_done_callback(self._served)
            self._tasks.append(task)

    async def score(self, items: Sequence[Item]) -> list[Score]:
        """One Score per item, in the order of `items`. Bounded by the samples ahead times the time limit."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Score]] = []
        try:
            for item in items:
                future: asyncio.Future[Score] = loop.create_future()
                futures.append(future)
                await self._queue.put((item, future))
                if self._error is not None:  # nobody takes from the queue any more
                    self._break(self._error)
            results = await asyncio.gather(*futures, return_exceptions=True)
        finally:
            for future in futures:  # of a caller that was cancelled: it wants nothing scored any more
                future.cancel()
        scores = [result for result in results if isinstance(result, Score)]
        if len(scores) < len(items):
            error = next(result for result in results if isinstance(result, BaseException))
            raise RewardPoolError(str(self._error or error)) from (self._error or error)
        return scores

    async def close(self, deadline: float = 5.0) -> None:
        """Ends the workers, in the middle of a sample where need be; whoever waits in `score` gets RewardPoolError."""
        for task in self._tasks:
            task.remove_done_callback(self._served)
            task.cancel()
        async with asyncio.timeout(deadline):
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._break(RewardPoolError("the reward pool is closed"))

    async def _start_child(self) -> Child:
        return await Child.start(self._spec, self._startup_timeout)

    async def _serve(self, child: Child) -> None:
        try:
            while True:
                item, future = await self._queue.get()
                try:
                    if future.cancelled():
                        continue
                    for attempt in range(_ATTEMPTS):
                        score, alive = await self._score(child, item)
                        if not alive:
                            self.counters["restarts"] += 1
                            child = await self._start_child()
                        if alive or score.failure is None or score.failure.kind != "died" or attempt == _ATTEMPTS - 1:
                            break
                    self._count(score)
                    if not future.done():
                        future.set_result(score)
                finally:
                    # Reached without a result when the worker cannot be replaced or the pool closes.
                    if not future.done():
                        future.set_exception(RewardPoolError(f"the reward pool ended while it scored {item.sample}"))
        finally:
            await child.kill()

    async def _score(self, child: Child, item: Item) -> tuple[Score, bool]:
        """The score of `item`, and whether the child can go on."""
        try:
            reply = await child.score(item, self._timeout)
        except TimeoutError:
            await child.kill()
            return self._failed("timeout", item, f"not scored within --rm-timeout {self._timeout} s"), False
        except ChildDiedError:
            return self._failed("died", item, f"its process ended with {await child.kill(1.0)}"), False
        if "failed" in reply:
            return self._failed(reply["failed"], item, reply["detail"]), True
        return Score(reply["value"]), True

    def _failed(self, kind: FailureKind, item: Item, detail: str) -> Score:
        return Score(None, Failure(kind, self._spec.function, item.sample, detail))

    def _count(self, score: Score) -> None:
        if score.failure is not None:
            self.counters[f"failed_{score.failure.kind}"] += 1
        else:
            self.counters["abstained" if score.abstained else "scored"] += 1

    def _served(self, task: asyncio.Task[Any]) -> None:
        # With one worker gone the others could go on, but a function that cannot be started again is no state to
        # train in: the pool as a whole ends.
        error = None if task.cancelled() else task.exception()
        self._break(error or RewardPoolError("a reward worker was cancelled"))

    def _break(self, error: BaseException) -> None:
        self._error = self._error or error
        while not self._queue.empty():
            _, future = self._queue.get_nowait()
            if not future.done():
                future.set_exception(error)

"""The prompts of a run in their order: shuffled by (seed, epoch), across epochs, resumable.

A background thread reads, tokenizes and filters ahead of the controller, so the controller's loop never tokenizes.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from relax.data.errors import DataError
from relax.data.sources import PromptSource
from relax.data.tokenize import PromptTokenizer, tokenize


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The next prompt to hand out: `index` counts in the shuffled order of `epoch`."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row, tokenized. `prompt_id` is the row's index in its source; `token_ids` is int32; `row` is the row as JSON,
    as it travels."""

    prompt_id: int
    epoch: int
    index: int
    text: str
    token_ids: np.ndarray
    row: bytes


@dataclass(frozen=True, slots=True)
class PromptRules:
    """How rows become prompts. `max_len` is in tokens (None: no limit); `overlong` is `refuse` or `filter`."""

    input_key: str
    apply_chat_template: bool = False
    max_len: int | None = None
    overlong: str = "refuse"


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The permutation (int64) of `size` rows in `epoch`.

    Sorting raw Philox output is used instead of numpy's own shuffle because only the raw stream is promised to stay the
    same across numpy versions, and a resumed run must see the order of the broken one.
    """
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")


class PromptReader:
    """Any prompt of any epoch, tokenized and held to the rules, the same for whoever asks."""

    def __init__(self, source: PromptSource, tokenizer: PromptTokenizer, rules: PromptRules, seed: int) -> None:
        self.source, self._tokenizer, self.rules, self._seed = source, tokenizer, rules, seed

    def order(self, epoch: int) -> np.ndarray:
        """The prompt ids (int64) of an epoch in their order."""
        return epoch_order(self._seed, epoch, len(self.source))

    def again(self, wanted: Sequence[tuple[int, Position]]) -> list[Prompt]:
        """Prompts that were handed out before, each as (prompt id, its position), in that order.

        Raises DataError when another prompt is there now, or one that the rules leave out.
        """
        orders = {epoch: self.order(epoch) for epoch in {position.epoch for _, position in wanted}}
        prompts = []
        for prompt_id, position in wanted:
            epoch, index = position.epoch, position.index
            order = orders[epoch]
            found = int(order[index]) if index < len(order) else None
            prompt = None if found != prompt_id else self.prompt(prompt_id, epoch, index)
            if prompt is None:
                there = "no prompt" if found is None else f"prompt {found}" if found != prompt_id else "one left out"
                raise DataError(
                    f"prompt {prompt_id} was drawn at position {index} of epoch {epoch}, and there is {there} now",
                    "A run is resumed with the --prompt-data that it had.",
                )
            prompts.append(prompt)
        return prompts

    def prompt(self, prompt_id: int, epoch: int, index: int) -> Prompt | None:
        """The prompt at `index` of `epoch`; None where it is over the limit and is filtered."""
        row = self.source.row(prompt_id)
        rules = self.rules
        try:
            tokenized = tokenize(
                self._tokenizer, row, input_key=rules.input_key, apply_chat_template=rules.apply_chat_template
            )
        except DataError as error:
            raise error.at(self.source.where(prompt_id)) from None
        length = len(tokenized.token_ids)
        if rules.max_len is not None and length > rules.max_len:
            if rules.overlong == "filter":
                return None
            raise DataError(
                f"{self.source.where(prompt_id)}: the prompt has {length} tokens, over --rollout-max-prompt-len "
                f"{rules.max_len}",
                "Raise it, or leave long prompts out with --overlong-prompts filter.",
            )
        return Prompt(prompt_id, epoch, index, tokenized.text, tokenized.token_ids, json.dumps(row).encode())


class PromptStream:
    """Prompts one after the other, epoch after epoch, until `num_epoch` epochs are over (None: for ever).

    `take` and `next` may be called from one event loop; `position` then names the next prompt to hand out, and a stream
    started `at` it continues exactly there. An error of the thread (a bad row, a prompt over the limit under `refuse`)
    is raised by the next call. `filtered` counts the prompts left out before `position`.
    """

    def __init__(
        self,
        source: PromptSource,
        tokenizer: PromptTokenizer,
        rules: PromptRules,
        *,
        seed: int,
        num_epoch: int | None = None,
        at: Position = Position(),
        ahead: int = 256,
    ) -> None:
        if num_epoch is not None and num_epoch < 1:
            raise DataError(f"--num-epoch is {num_epoch}", "It must be at least 1.")
        self.position = at
        self.filtered = 0
        self.reader = PromptReader(source, tokenizer, rules, seed)
        self._num_epoch, self._ahead = num_epoch, ahead
        self._ready: deque[tuple[Prompt, int]] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._closed = self._finished = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="prompts", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True once every prompt of the last epoch has been taken."""
        with self._changed:
            return self._finished and not self._ready

    def take(self) -> Prompt | None:
        """The next prompt if one is ready, else None (see `ended`). Never blocks."""
        with self._changed:
            if not self._ready:
                if self._error is not None:
                    raise self._error
                return None
            prompt, filtered = self._ready.popleft()
            self.filtered += filtered
            self.position = Position(prompt.epoch, prompt.index + 1)
            self._changed.notify()
            return prompt

    async def next(self, deadline: float) -> Prompt | None:
        """The next prompt, waited for at most `deadline` seconds; None when the stream has ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        while (prompt := self.take()) is None and not self.ended:
            with self._changed:
                if self._ready or self._finished or self._error is not None:
                    continue
                waiter = loop.create_future()
                self._waiter = (loop, waiter)
            try:
                async with asyncio.timeout_at(end):
                    await waiter
            except TimeoutError:
                raise TimeoutError(f"no prompt was tokenized within {deadline} s (at {self.position})") from None
            finally:
                with self._changed:
                    self._waiter = None
        return prompt

    def close(self, deadline: float = 10.0) -> None:
        """Ends the thread and waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(deadline)
        if self._thread.is_alive():
            raise TimeoutError(f"the prompt thread did not end within {deadline} s")

    def _work(self) -> None:
        try:
            for item in self._prompts():
                with self._changed:
                    while len(self._ready) >= self._ahead and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._wake()
            with self._changed:
                self._finished = True
                self._wake()
        except Exception as error:  # carried to the caller of take(): this thread has nobody above it
            with self._changed:
                self._error = error
                self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            loop, waiter = self._waiter
            self._waiter = None
            loop.call_soon_threadsafe(_resolve, waiter)

    def _prompts(self) -> Iterator[tuple[Prompt, int]]:
        """Each prompt with the number of prompts filtered since the one before."""
        filtered = 0
        epoch, first = self.position.epoch, self.position.index
        while self._num_epoch is None or epoch < self._num_epoch:
            fits = first
            for index, prompt_id in enumerate(self.reader.order(epoch).tolist()):
                if index < first:
                    continue
                if self._closed:
                    return
                prompt = self.reader.prompt(prompt_id, epoch, index)
                if prompt is None:
                    filtered += 1
                    continue
                fits += 1
                yield prompt, filtered
                filtered = 0
            if fits == 0:
                raise DataError(
                    f"all {len(self.reader.source)} prompts are longer than --rollout-max-prompt-len "
                    f"{self.reader.rules.max_len}",
                    "Raise it.",
                )
            epoch, first = epoch + 1, 0


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

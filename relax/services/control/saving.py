"""When a checkpoint is written, and by whom: the models write their parts, the controller the copy of its ledger.

No process pauses for it. The models copied their state when they had trained the batch before the cut; what follows is
written while the run goes on, and a checkpoint that fails is named, counted and done without.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from relax.checkpoints import Checkpoint, CheckpointDirectory, CheckpointError, Writing
from relax.ledger.states import LedgerError
from relax.ledger.store import Ledger
from relax.protocol.errors import ProtocolError
from relax.protocol.messages import Save, Saved

LEDGER = "ledger"
LEDGER_FILE = "ledger.sqlite"

# Asks the service of a role; raises ProtocolError when it does not answer.
Ask = Callable[[str, Save], Awaitable[Saved]]

log = structlog.get_logger()


class Saving:
    """`roles` are the services with a model to be saved; `interval` in batches (None: at the end alone). `last` is the
    cut of the newest checkpoint that was begun and `written` of the newest that is complete, at first the one that the
    lineage began from (-1: none). `room` gives the bytes of a checkpoint, None where they are not known yet."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        roles: Sequence[str],
        ask: Ask,
        *,
        run_id: str,
        lineage: int,
        options: str,
        first_batch: int = 0,
        interval: int | None = None,
        deadline: float = 600.0,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._directory, self._roles, self._ask = directory, tuple(roles), ask
        self._run_id, self._lineage, self._options = run_id, lineage, options
        self._interval, self._deadline, self._room = interval, deadline, room
        self._one = asyncio.Lock()
        self.last = first_batch
        self.written = first_batch or -1
        self.failed = 0

    def due(self, version: int) -> int | None:
        """The cut whose time has come now that the trainer is at `version`; None when there is none.

        More than one batch may have been trained since the last turn: the ledger of a later moment serves the cut too.
        """
        if self._interval is None:
            return None
        cut = version // self._interval * self._interval
        return cut if cut > self.last else None

    async def write(self, cut: int, ledger: Ledger, *, wait: bool = False) -> Checkpoint | None:
        """Writes the checkpoint of `cut`, which the ledger was told of in a turn that is saved. None when it failed, or
        was written already.

        While another is being written this one is left out, unless it may `wait`.
        """
        self.last = max(self.last, cut)
        if self._one.locked() and not wait:
            await self._give_up(cut, "the one before is still being written")
            return None
        async with self._one:
            if self.written >= cut:
                return None
            started = time.monotonic()
            try:
                writing = await asyncio.to_thread(self._directory.begin, cut, wanted=self._room())
            except CheckpointError as error:
                await self._give_up(cut, str(error))
                return None
            problems = await self._parts(writing, ledger)
            if not problems:
                try:
                    made = await asyncio.to_thread(
                        self._directory.complete,
                        writing,
                        parts=(LEDGER, *self._roles),
                        run_id=self._run_id,
                        lineage=self._lineage,
                        options=self._options,
                    )
                except CheckpointError as error:
                    problems = [str(error)]
                else:
                    self.written = cut
                    seconds = round(time.monotonic() - started, 3)
                    log.info("checkpoint_written", batch=cut, bytes=made.size, seconds=seconds, path=str(made.path))
                    return made
            await asyncio.to_thread(self._directory.abandon, writing)
            self._failed(cut, "; ".join(problems))
            return None

    async def _parts(self, writing: Writing, ledger: Ledger) -> list[str]:
        """Why parts are missing; nothing when all were written. Returns when nobody writes any more."""
        save = Save(writing.batch, writing.path.name)
        written = (self._model(role, save) for role in self._roles)
        told = await asyncio.gather(self._ledger(writing, ledger), *written)
        return [problem for problem in told if problem]

    async def _ledger(self, writing: Writing, ledger: Ledger) -> str:
        copy = writing.part(LEDGER) / LEDGER_FILE
        try:
            await asyncio.wrap_future(ledger.begin_backup(copy, self._deadline))
            await asyncio.to_thread(writing.close_part, LEDGER)
        except (LedgerError, OSError) as error:
            return f"controller: {error}"
        return ""

    async def _model(self, role: str, save: Save) -> str:
        try:
            reply = await self._ask(role, save)
        except ProtocolError as error:
            return f"{role}: {error}"
        return f"{role}: {reply.problem}" if reply.problem else ""

    async def _give_up(self, cut: int, problem: str) -> None:
        """Nobody is to write the checkpoint; the models forget the state that they copied for it."""
        self._failed(cut, problem)
        for problem in await asyncio.gather(*(self._model(role, Save(cut, "")) for role in self._roles)):
            if problem:
                log.warning("snapshot_not_forgotten", batch=cut, problem=problem)

    def _failed(self, cut: int, problem: str) -> None:
        self.failed += 1
        log.error("checkpoint_not_written", batch=cut, error=problem)

"""The controller: decides which groups are sampled, which are trained, and when the run is over.

It holds the gate, the ledger, the registry and the cursor of the data, and touches no tensor. Every stage reports here.
A report is taken by the part that it concerns (relax/services/control) and wakes the turn, which does all that may
happen now: issue what the gate lets be issued, commit the batch it lets be committed, save what changed.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from relax.algorithms.contracts import models_saved, services_needed
from relax.checkpoints import CheckpointDirectory
from relax.config.resume import fingerprint
from relax.config.schema import RESTARTED
from relax.config.tail import planned_batches
from relax.data import DataError, PromptRules, PromptStream, PromptTokenizer, open_source
from relax.gate.gate import Gate
from relax.gate.verdicts import GateError, Wait
from relax.ledger.book import GroupBook
from relax.ledger.revived import Revived
from relax.ledger.states import LedgerError
from relax.metrics.rows import BatchRows
from relax.protocol.errors import ProtocolError
from relax.protocol.messages import (
    Assembled,
    Filtered,
    Finish,
    Finished,
    HandedBack,
    Heartbeat,
    HeartbeatReceived,
    Hello,
    Leaving,
    Member,
    Members,
    Published,
    Ready,
    Register,
    Registered,
    Rejected,
    RewardDone,
    Sampled,
    Save,
    Saved,
    Serving,
    Shutdown,
    Started,
    Trained,
    Welcome,
    Withdraw,
    Withdrawn,
)
from relax.services.control.batches import Batches
from relax.services.control.deaths import Deaths
from relax.services.control.groups import Groups
from relax.services.control.health import nothing_trained, trouble
from relax.services.control.issue import Issue
from relax.services.control.opening import open_ledger, open_prompts
from relax.services.control.registry import ALWAYS_NEEDED, Entry, Registry
from relax.services.control.saving import Saving
from relax.services.control.state import PipelineState
from relax.services.control.status import LARGEST_SHARE, STATUS_SECONDS, StatusFile
from relax.services.control.weights import Weights
from relax.services.service import Context, Service, ServiceError, shared_options
from relax.status.snapshot import Seen, Snapshot
from relax.weights.errors import WeightError

CHECK_SECONDS = 0.25
# How long the rows of a finished run wait for a contributor.
END_SECONDS = 10.0
# How long a member may take to hear that the run is over, or that it may go.
FAREWELL_SECONDS = 1.5
# Of a model's part of a checkpoint, besides its tensors.
SMALL_FILES = 100_000
# The controller that was held up for so long could hear nobody.
HELD_UP_SECONDS = 2.0


class Controller(Service):
    role = "controller"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        o = self.options
        last = None if o.num_rollout is None else o.num_rollout - 1
        spare = 0 if o.over_sampling_batch_size is None else o.over_sampling_batch_size - o.rollout_batch_size
        extra = services_needed(o)
        trainers = frozenset({"actor"}) | (extra & {"critic"})
        cut = context.cut
        gate = Gate(o.rollout_batch_size, o.max_staleness, o.rollout_lead, last, first_batch=cut, spare=spare)
        registry = Registry(shared_options(o), (*ALWAYS_NEEDED, *sorted(extra)))
        state = PipelineState(o, gate, GroupBook(self.lineage), registry, self.of_role)
        self.gate, self.book, self.registry = gate, state.book, registry
        self.draws, self.replicas, self.outbox, self.pace = state.draws, state.replicas, state.outbox, state.pace
        self.rows = BatchRows(
            self.run.metrics,
            frozenset({"controller", "advantages"}) | trainers,
            self.lineage,
            o.num_steps_per_rollout,
            END_SECONDS,
            first_batch=cut,
        )
        self.issue = Issue(state)
        self.groups = Groups(state)
        self.deaths = Deaths(state, self.groups)
        self.weights = Weights(state)
        self.batches = Batches(state, self.groups, self.weights, self.rows, trainers, self.resident_bytes)
        now = time.time()
        me = Seen(
            self.name, self.role, context.node, os.getpid(), self.incarnation, True, now, now, self.activity, None
        )
        self.status = StatusFile(self.run.status, self.run.run_id, self.lineage, socket.gethostname(), me)
        self.saving: Saving | None = None  # there is none with --no-save
        self._stream_end_told = False
        self._finishing = self._going_home = False
        self._started_at = self._moved = time.monotonic()
        self._open_for_members = asyncio.Event()
        self._woken = asyncio.Event()

    def handlers(self) -> dict[type, Any]:
        self.mailbox.on(Hello, self.on_hello, strangers=True)
        reports: dict[type, tuple[Callable[[Any, Any], None], tuple[str, ...]]] = {
            Serving: (self.weights.serving, ("rollout",)),
            Published: (self.weights.published, ("actor",)),
            Sampled: (self.groups.sampled, ("rollout",)),
            RewardDone: (self.groups.reward_done, ("reward",)),
            Ready: (self.groups.ready, ("advantages",)),
            Filtered: (self.groups.filtered, ("advantages",)),
            Rejected: (self.groups.rejected, ("rollout", "reward", "advantages")),
            HandedBack: (self.groups.handed_back, ("rollout", "reward", "advantages")),
            Leaving: (self.member_leaves, ("rollout", "reward")),
            Started: (self.batches.started, ("actor",)),
            Assembled: (self.batches.assembled, ("advantages",)),
            Trained: (self.batches.trained, ("actor", "critic")),
        }
        asked: dict[type, Any] = {Register: self.on_register, Heartbeat: self.on_heartbeat}
        return asked | {kind: self._report(take, roles) for kind, (take, roles) in reports.items()}

    def _report(self, take: Callable[[Any, Any], None], roles: tuple[str, ...]) -> Any:
        """Only members of these roles are believed. A report that contradicts what is known is a fault of its sender,
        and of the run, since nothing else that it says can be trusted."""

        async def handle(message: Any, sender: Any) -> None:
            what, role = f"{sender.name} sends {type(message).__name__}", self.registry.role(sender.name)
            # What a life that has ended still said was decided without it.
            if not self.registry.is_member(sender.name, sender.incarnation):
                self.log.info("report_of_no_member", sender=sender.name, kind=type(message).__name__)
                return
            if role not in roles:
                raise ServiceError(f"{what}, which only {' and '.join(roles)} do")
            try:
                take(message, sender)
            except (GateError, LedgerError, WeightError) as error:
                raise ServiceError(f"{what}, which cannot be: {error}") from error
            self._woken.set()

        return handle

    def bind(self) -> str:
        return self.context.controller

    async def join(self) -> None:
        """Others join here; the controller is a member of nothing."""

    async def prepare(self) -> None:
        self.ledger, revived = await asyncio.to_thread(open_ledger, self.run)
        if revived is not None:
            self.book.revive(revived)
            self.book.save(self.ledger)
            self.log.info("run_resumed", batch=revived.cut, parent=revived.parent, revived=len(revived.groups))
        if self.options.save:
            self.saving = self._checkpoints()
        self.stream = await asyncio.to_thread(self._open_stream, revived)
        self._open_for_members.set()
        self.activity = "at work"
        self.spawn(self._turns(), "turns")
        self.spawn(self._watch_over(), "watch")
        self.spawn(self._tell_status(), "status")

    def _checkpoints(self) -> Saving:
        o, roles = self.options, models_saved(self.options)
        return Saving(
            CheckpointDirectory(self.run.checkpoints_dir, keep=o.keep_checkpoints),
            roles,
            self._ask_to_save,
            run_id=self.run.run_id,
            lineage=self.lineage,
            options=fingerprint(o),
            first_batch=self.context.cut,
            interval=o.save_interval,
            deadline=o.stall_timeout,
            room=lambda: self._checkpoint_bytes(roles),
        )

    async def _ask_to_save(self, role: str, message: Save) -> Saved:
        """However long it writes: the deadline is on its silence, and on its getting on, which it sees to itself."""
        try:
            member = await self.member(role)
        except ServiceError as error:
            return Saved(message.batch, str(error))
        reply = await self.ask(member.endpoint, message)
        assert isinstance(reply, Saved)
        return reply

    def _checkpoint_bytes(self, roles: Sequence[str]) -> int | None:
        """What the models told of their size, and room for the small files; the ledger's copy is as large as it."""
        told = [entry.gauges.get("checkpoint_bytes") for role in roles for entry in self.registry.of_role(role)]
        known = [size for size in told if size is not None]
        if not known or len(known) < len(told):
            return None
        return int(sum(known)) + SMALL_FILES * len(known) + self.run.ledger.stat().st_size

    def _open_stream(self, revived: Revived | None) -> PromptStream:
        o = self.options
        source = open_source(o.prompt_data, seed=o.seed)
        self.num_batches = planned_batches(o, prompts=len(source))
        rules = PromptRules(o.input_key, o.apply_chat_template, o.rollout_max_prompt_len, o.overlong_prompts)
        ahead = max(256, 2 * self.gate.slots)
        tokenizer = PromptTokenizer(o.hf_checkpoint)
        return open_prompts(
            self.draws, revived, source, tokenizer, rules, seed=o.seed, num_epoch=o.num_epoch, ahead=ahead
        )

    async def release(self) -> None:
        if not self.clean:
            await self._send_home(Shutdown("the controller ended", failed=True))
        if self._open_for_members.is_set():
            self.rows.close_due(everything=True)
            self.book.save(self.ledger)
            self.status.write(self._status(code=self.exit_code))
            await asyncio.to_thread(self.ledger.close)
            await asyncio.to_thread(self.stream.close)

    # --- members -----------------------------------------------------------------------------------------------------

    async def on_hello(self, message: Hello, sender: Any) -> Welcome:
        return Welcome(self.run.run_id, self.lineage, self.context.cut)

    async def on_register(self, message: Register, sender: Any) -> Registered:
        await self._open_for_members.wait()
        member, now = message.member, time.monotonic()
        self.registry.check(message)
        if (held := self.registry.other_life(member)) is not None:
            self._ended_life(held, f"was started again as pid {message.pid}", now)
        self.registry.register(message, now)
        self.log.info("member_joined", member=member.name, role=member.role, node=message.node, pid=message.pid)
        self._members_are()
        if member.role == "rollout":
            self.weights.announce(self.replicas.joined(member))
        self._woken.set()
        return Registered(self.num_batches)

    def _ended_life(self, entry: Entry, how: str, now: float) -> None:
        """A member is one no more: its groups come again, and so may its next life. Raises ServiceError, and ends the
        run, where it cannot go on."""
        member = entry.member
        told = f"{member.name} (pid {entry.pid}) {how}, last seen {entry.activity}"
        fatal = member.role not in RESTARTED
        if member.role == "reference" and self.options.ref_update_interval is not None:
            fatal, told = True, f"{told}; the version that it was refreshed to may be stored no more"
        if fatal:
            error = ServiceError(told)
            self.fail(error)
            raise error
        self.log.warning("member_lost", member=member.name, pid=entry.pid, how=how, activity=entry.activity)
        self.registry.remove(member, now, died=True)
        self.deaths.died(member)
        self._members_are()
        if member.role == "advantages":
            for asked in self.batches.untrained():
                self.spawn(self._withdraw(asked), f"withdraw batch {asked.batch}")
        self._moved = now
        self._woken.set()

    async def _withdraw(self, asked: Withdraw) -> None:
        held = {}
        for role in sorted(self.batches.trainers):
            trainer = await self.member(role)
            reply = await self.mailbox.ask(trainer.endpoint, asked, deadline=self.options.peer_timeout)
            assert isinstance(reply, Withdrawn)
            held[role] = reply.held
        self.batches.withdrawn(asked, held)
        self._woken.set()

    def _members_are(self) -> None:
        """Everybody learns who is a member now."""
        members = self.registry.members()
        self.learn(members)
        for member in members:
            self.send(member.endpoint, Members(members))

    async def on_heartbeat(self, message: Heartbeat, sender: Any) -> HeartbeatReceived:
        entry = self.registry.entries.get(message.name)
        before = entry and entry.work
        if not self.registry.beat(message, time.monotonic()):
            raise ServiceError(f"{message.name} ({message.incarnation}) is not a member of this run")
        if entry is not None and entry.work != before:
            self._moved = time.monotonic()
        return HeartbeatReceived()

    def resident_bytes(self) -> dict[str, float]:
        """What every service weighed when it was measured last, by name."""
        gauges = {self.name: self.gauges, **{e.member.name: e.gauges for e in self.registry.entries.values()}}
        return {name: of["rss_bytes"] for name, of in gauges.items() if "rss_bytes" in of}

    def member_leaves(self, message: Leaving, sender: Any) -> None:
        """A rollout stays until nobody needs what it holds; what a reward service has is scored by another."""
        replica, entry = self.replicas.get(sender.name), self.registry.entries[sender.name]
        if replica is None:
            self.log.info("member_leaves", member=sender.name)
            self.spawn(self._part_from(entry.member), f"parting from {sender.name}")
        elif replica.member.incarnation == sender.incarnation:
            self.log.info("member_leaves", member=sender.name, sampling=len(replica.samples))
            self.replicas.leaves(replica)

    async def _part_from(self, member: Member) -> None:
        """It may go."""
        try:
            word = Shutdown("it leaves the run", failed=False)
            await self.mailbox.tell(member.endpoint, word, deadline=FAREWELL_SECONDS)
        except ProtocolError as error:
            self.log.warning("goodbye_not_heard", member=member.name, problem=str(error))
        self.registry.remove(member, time.monotonic(), died=False)
        self.deaths.left(member)
        self._members_are()
        self._woken.set()
        if not self.registry.expects(member.role) and not self.gate.finished:
            raise ServiceError(f"every {member.role} replica has left, and the run has batches to sample")

    async def _watch_over(self) -> None:
        """Who is silent is no member any more; missing services and stalls end the run with a name; new prompts and
        late rows get their turn."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now, before = time.monotonic(), looked
            looked = now
            if now - before > HELD_UP_SECONDS:
                self.registry.bear_with(now - before)
            if self._going_home:
                continue
            while (quiet := self.registry.silent(now, self.options.peer_timeout)) is not None:
                silence = f"has been silent for {now - quiet.heard:.0f} s"
                self._ended_life(quiet, f"{silence} (--peer-timeout {self.options.peer_timeout:g})", now)
            self.rows.close_due()
            if self._finishing:
                continue
            if self.replicas.all_leave and not self.gate.finished:
                raise ServiceError("every rollout replica has left, and the run has batches to sample")
            found = trouble(
                self.registry,
                self.options,
                now=now,
                started=self._started_at,
                moved=self._moved,
                waits=self._waits,
            )
            if found is not None:
                raise ServiceError(found)
            self._woken.set()

    def _waits(self) -> str:
        """What the next batch waits for, and where it was heard of last."""
        blocked = self.gate.blocked()
        groups = blocked.groups or (self.gate.outstanding() if blocked.wait is Wait.READY else ())
        return f"{blocked} ({self.groups.whereabouts(groups)})" if groups else str(blocked)

    async def _tell_status(self) -> None:
        while True:
            began = time.monotonic()
            status = self._status(code=None)
            gathered = time.monotonic() - began
            await asyncio.to_thread(self.status.write, status)
            await asyncio.sleep(max(STATUS_SECONDS, gathered / LARGEST_SHARE))

    def _status(self, code: int | None) -> Snapshot:
        return self.status.gather(
            self.gate,
            self.registry,
            self.replicas,
            activity=self.activity,
            code=code,
            moved=self._moved,
            batches=self.num_batches,
            rss_bytes=self.gauges.get("rss_bytes"),
        )

    # --- a turn ------------------------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        """One turn for all reports that came since the last one."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if not self._finishing:
                self._turn(time.monotonic())

    def _turn(self, now: float) -> None:
        """Everything that may happen now, happens now."""
        try:
            self._tell_end_of_stream()
            self.groups.drop_stragglers(now)
            if self.batches.commit():
                self._moved = now
            self.issue.turn(now)
        except DataError as error:  # found while reading ahead: a row that is no prompt
            raise ServiceError(str(error)) from None
        self.rows.close_due()
        if self.book.save(self.ledger):
            self._save_if_due()
        for endpoint, message in self.outbox.empty():
            self.send(endpoint, message)
        for replica in self.replicas.departures():
            self.spawn(self._part_from(replica.member), f"parting from {replica.member.name}")
        # A resume may have nothing left to train; the actor can be told so once it is there.
        at_work = self.gate.published_version is not None
        if at_work and self.gate.finished and self.gate.version == self.gate.next_batch:
            if self.gate.version == 0:
                raise ServiceError(nothing_trained(self.book.conservation()))
            self._finishing = True
            self.spawn(self._finish(), "finish")

    def _save_if_due(self) -> None:
        """The ledger has been told of all that the cut needs."""
        if self.saving is not None and (cut := self.saving.due(self.gate.version)) is not None:
            self.saving.last = cut
            self.spawn(self.saving.write(cut, self.ledger), f"checkpoint {cut}")

    def _tell_end_of_stream(self) -> None:
        if not self._stream_end_told and self.draws.stream_ended:
            self._stream_end_told = True
            self.gate.end(to_come=self.draws.coming_back)

    async def _finish(self) -> None:
        """Every batch is trained: the actor writes what is left to write, the others are sent home."""
        self.activity = "finishing"
        if self.saving is not None:
            while not self.book.save(self.ledger):
                await asyncio.to_thread(self.ledger.flush, self.options.stall_timeout)
            await self.saving.write(self.gate.version, self.ledger, wait=True)
        actor = await self.member("actor")
        reply = await self.mailbox.ask(actor.endpoint, Finish(), deadline=self.options.stall_timeout)
        assert isinstance(reply, Finished)
        self.log.info("run_finished", version=reply.version, export=reply.export, batches=self.gate.version)
        deadline = time.monotonic() + END_SECONDS
        while self.rows.open and time.monotonic() < deadline:
            self.rows.close_due()
            await asyncio.sleep(CHECK_SECONDS / 5)
        self._going_home = True
        await self._send_home(Shutdown("the run is finished", failed=False))
        self.end(0)

    async def _send_home(self, word: Shutdown) -> None:
        """Every member learns that the run is over; one that does not listen any more is named and left."""
        members = self.registry.members()
        goodbyes = (self.mailbox.tell(m.endpoint, word, deadline=FAREWELL_SECONDS) for m in members)
        for member, answer in zip(members, await asyncio.gather(*goodbyes, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                self.log.warning("goodbye_not_heard", member=member.name, problem=str(answer))

"""The controller: decides which groups are sampled, which are trained, and when the run is over.

It holds the gate, the ledger, the registry and the cursor of the data, and touches no tensor. Every stage reports here;
a handler records what happened and takes a turn: issue what the gate lets be issued, commit the batch it lets be
committed, save what changed.
"""

import asyncio
import time
from typing import Any

from relax.algorithms.contracts import services_needed
from relax.data import DataError, PromptRules, PromptStream, PromptTokenizer, open_source
from relax.gate.gate import Gate
from relax.gate.verdicts import Batch
from relax.ledger.book import GroupBook
from relax.ledger.states import Accepted, State
from relax.ledger.store import Ledger
from relax.metrics.rows import BatchRows
from relax.protocol.messages import (
    Announce,
    Assemble,
    Assembled,
    Filtered,
    Finish,
    Finished,
    Generate,
    GroupOrder,
    Heartbeat,
    HeartbeatReceived,
    Hello,
    Lease,
    Members,
    Published,
    Ready,
    Register,
    Registered,
    Rejected,
    Release,
    RewardDone,
    Sampled,
    Serving,
    Shutdown,
    Started,
    Trained,
    Welcome,
)
from relax.services.draws import Draw, Draws
from relax.services.health import trouble
from relax.services.pace import Pace
from relax.services.registry import ALWAYS_NEEDED, Registry
from relax.services.replicas import Replica, Replicas
from relax.services.service import Context, Service, ServiceError, shared_options
from relax.weights.manifest import Manifest

CHECK_SECONDS = 0.25
# How long the rows of a finished run wait for a contributor.
END_SECONDS = 10.0
# How long the members of a run may take to hear that it is over.
FAREWELL_SECONDS = 1.5
# So many batches' worth of groups may be filtered in a row without one that is not.
FILTERED_BATCHES = 10
# A member that was heard so recently is alive: its name is taken.
ALIVE_SECONDS = 5.0


class Controller(Service):
    role = "controller"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        o = self.options
        last = None if o.num_rollout is None else o.num_rollout - 1
        self.lockstep = o.max_staleness == 0
        self.gate = Gate(o.rollout_batch_size, o.max_staleness, o.rollout_lead, last)
        self.book = GroupBook(self.lineage)
        extra = services_needed(o)
        self.trainers = frozenset({"actor"}) | (extra & {"critic"})
        self.registry = Registry(shared_options(o), (*ALWAYS_NEEDED, *sorted(extra)))
        self.replicas = Replicas()
        self.weights: Published | None = None
        self.rows = BatchRows(
            self.run.metrics,
            frozenset({"controller", "advantages"}) | self.trainers,
            self.lineage,
            o.num_steps_per_rollout,
            END_SECONDS,
        )
        self._trained: dict[int, dict[str, Trained]] = {}  # batch -> role -> its report, until all have reported
        self._early_publication: Published | None = None
        self.pace = Pace()
        self._unusable_in_a_row = 0
        self._stream_end_told = False
        self._finishing = False
        self._started_at = self._moved = time.monotonic()
        self._open_for_members = asyncio.Event()

    def handlers(self) -> dict[type, Any]:
        self.mailbox.on(Hello, self.on_hello, strangers=True)
        return {
            Register: self.on_register,
            Heartbeat: self.on_heartbeat,
            Serving: self.on_serving,
            Sampled: self.on_sampled,
            RewardDone: self.on_reward_done,
            Ready: self.on_ready,
            Filtered: self.on_filtered,
            Rejected: self.on_rejected,
            Started: self.on_started,
            Assembled: self.on_assembled,
            Trained: self.on_trained,
            Published: self.on_published,
        }

    def bind(self) -> str:
        return self.context.controller

    async def join(self) -> None:
        """Others join here; the controller is a member of nothing."""

    async def prepare(self) -> None:
        self.ledger = Ledger(self.run.ledger, run_id=self.run.run_id, lineage=self.lineage)
        self.stream = await asyncio.to_thread(self._open_stream)
        self.draws = Draws(self.stream)
        self._open_for_members.set()
        self.spawn(self._watch_over(), "watch")

    def _open_stream(self) -> PromptStream:
        o = self.options
        source = open_source(o.prompt_data, seed=o.seed)
        planned = [o.num_rollout] if o.num_rollout else []
        if o.num_epoch:
            planned.append(-(-len(source) * o.num_epoch // o.rollout_batch_size))
        self.num_batches = min(planned, default=None)
        rules = PromptRules(o.input_key, o.apply_chat_template, o.rollout_max_prompt_len, o.overlong_prompts)
        ahead = max(256, 2 * self.gate.slots)
        tokenizer = PromptTokenizer(o.hf_checkpoint)
        return PromptStream(source, tokenizer, rules, seed=o.seed, num_epoch=o.num_epoch, ahead=ahead)

    async def release(self) -> None:
        if not self.clean:
            await self._send_home(Shutdown("the controller ended", failed=True))
        if self._open_for_members.is_set():
            self.rows.close_due(everything=True)
            self.book.save(self.ledger)
            await asyncio.to_thread(self.ledger.close)
            await asyncio.to_thread(self.stream.close)

    # --- members -----------------------------------------------------------------------------------------------------

    async def on_hello(self, message: Hello, sender: Any) -> Welcome:
        return Welcome(self.run.run_id, self.lineage)

    async def on_register(self, message: Register, sender: Any) -> Registered:
        await self._open_for_members.wait()
        member, now = message.member, time.monotonic()
        if (held := self.registry.other_life(member)) is not None:
            if now - held.heard < ALIVE_SECONDS:
                raise ServiceError(f"{member.name} runs already on node {held.node or 'local'} (pid {held.pid})")
            # What it held is lost with it, and nothing takes it up again yet.
            died = f"{member.name} (pid {held.pid}) died: it was last heard {now - held.heard:.0f} s ago"
            self.fail(ServiceError(f"{died}, and was started again"))
            raise ServiceError(f"{died}; the run ends")
        self.registry.register(message, now)
        self.log.info("member_joined", member=member.name, role=member.role, node=message.node, pid=message.pid)
        self.learn(self.registry.members())
        for other in self.registry.members():
            if other.name != member.name:
                self.send(other.endpoint, Members(self.registry.members()))
        if member.role == "rollout":
            self._announce_to(self.replicas.joined(member))
        self._turn()
        return Registered(self.num_batches, self.registry.members())

    async def on_heartbeat(self, message: Heartbeat, sender: Any) -> HeartbeatReceived:
        entry = self.registry.entries.get(message.name)
        before = entry and (entry.activity, entry.counters)
        known = self.registry.beat(
            message.name, message.incarnation, message.activity, message.counters, time.monotonic()
        )
        if not known:
            raise ServiceError(f"{message.name} ({message.incarnation}) is not a member of this run")
        if before != (message.activity, message.counters):
            self._moved = time.monotonic()
        return HeartbeatReceived()

    async def _watch_over(self) -> None:
        """Silence, missing services and stalls end the run with a name; new prompts and late rows get their turn."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._finishing:
                continue
            found = trouble(
                self.registry,
                self.options,
                now=time.monotonic(),
                started=self._started_at,
                moved=self._moved,
                waits=str(self.gate.blocked()),
            )
            if found is not None:
                raise ServiceError(found)
            self._turn()

    # --- groups ------------------------------------------------------------------------------------------------------

    async def on_serving(self, message: Serving, sender: Any) -> None:
        replica = self.replicas.get(sender.name)
        if replica is not None and replica.member.incarnation == sender.incarnation:
            replica.version, replica.capacity = message.version, message.capacity
            for group in self.book.held_by(sender.name):
                if self.book[group].state is State.ISSUED:
                    self.gate.acknowledged(group, message.version)
        self._turn()

    async def on_sampled(self, message: Sampled, sender: Any) -> None:
        lease = message.lease
        outcome = self.book.advance(lease, State.SAMPLED, oldest=message.oldest_version, tokens=message.tokens)
        if isinstance(outcome, Accepted):
            self.gate.sampled(lease.group, message.oldest_version)
        self._left_replica(lease, sender.name)
        self._turn()

    async def on_reward_done(self, message: RewardDone, sender: Any) -> None:
        self.book.advance(message.lease, State.SCORED, location=sender.name)
        self._turn()

    async def on_ready(self, message: Ready, sender: Any) -> None:
        lease = message.lease
        outcome = self.book.advance(
            lease, State.READY, oldest=message.oldest_version, tokens=message.tokens, location=sender.name
        )
        if isinstance(outcome, Accepted):
            self.gate.ready(lease.group, message.oldest_version)
            self._unusable_in_a_row = 0
        self._turn()

    async def on_filtered(self, message: Filtered, sender: Any) -> None:
        lease = message.lease
        if isinstance(self.book.check(lease), Accepted):
            self.gate.drop(lease.group)
            self._drop(lease, message.reason)
            self._unusable(FILTERED_BATCHES, f"dropped by advantages: {message.reason}")
        self._turn()

    async def on_rejected(self, message: Rejected, sender: Any) -> None:
        lease = message.lease
        if message.stage == "rollout":
            self._left_replica(lease, sender.name)
        if isinstance(self.book.check(lease), Accepted):
            again = self.draws.rejected(lease.group)
            self.gate.drop(lease.group, again=again)
            self.log.warning("draw_rejected", group=lease.group, reason=message.reason, detail=message.detail)
            if again:
                self.book.drop(lease.group, message.reason, self.gate.version, again=True)
                self.pace.counts.sum(f"rollout/dropped/{message.reason}", 1)
                self._release((lease,))
            else:
                self._set_aside(lease, message)
        self._turn()

    def _set_aside(self, lease: Lease, why: Rejected) -> None:
        """A prompt that was rejected too often leaves the run."""
        prompt = self.draws[lease.group].prompt
        self.log.error(
            "prompt_set_aside",
            group=lease.group,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            stage=why.stage,
            reason=why.reason,
            error=why.detail,
        )
        self.pace.counts.sum("rollout/set_aside", 1)
        self._drop(lease, "set_aside")
        self._unusable(1, why.detail)

    def _unusable(self, batches: int, why: str) -> None:
        """Another group that will never be trained. So many batches' worth without a single good one between them is a
        fault of the run, which would go on for ever."""
        self._unusable_in_a_row += 1
        if self._unusable_in_a_row == self.options.rollout_batch_size:
            self.log.warning("no_group_is_usable", groups=self._unusable_in_a_row, last=why)
        if self._unusable_in_a_row >= batches * self.options.rollout_batch_size:
            raise ServiceError(f"{self._unusable_in_a_row} groups in a row could not be used; the last one: {why}")

    def _drop(self, lease: Lease, reason: str) -> None:
        self.book.drop(lease.group, reason, self.gate.version)
        self.draws.ended(lease.group)
        self.pace.counts.sum(f"rollout/dropped/{reason}", 1)
        self._release((lease,))

    def _left_replica(self, lease: Lease, name: str) -> None:
        replica = self.replicas.get(name)
        if replica is not None:
            replica.sampling -= 1

    def _release(self, leases: tuple[Lease, ...]) -> None:
        for role in ("rollout", "advantages"):
            for member in self.of_role(role):
                self.send(member.endpoint, Release(leases))

    # --- batches -----------------------------------------------------------------------------------------------------

    async def on_started(self, message: Started, sender: Any) -> None:
        self.gate.started(message.batch)
        self.book.started(message.batch)
        self._turn()

    async def on_assembled(self, message: Assembled, sender: Any) -> None:
        self.rows.report(message.batch, "advantages", message.metrics)
        self._turn()

    async def on_trained(self, message: Trained, sender: Any) -> None:
        b, role = message.batch, self.registry.role(sender.name)
        if role not in self.trainers:
            raise ServiceError(f"{sender.name} reports that it trained batch {b}, but it is no trainer of this run")
        reports = self._trained.setdefault(b, {})
        reports[role] = message
        self.rows.report(b, role, message.metrics)
        if reports.keys() == self.trainers:
            del self._trained[b]
            self._version_rises(b, reports["actor"])
        self._turn()

    def _version_rises(self, batch: int, by_actor: Trained) -> None:
        """Every trainer has finished the batch."""
        leases = self.book.trained(batch)
        self.gate.trained(batch)
        for lease in leases:
            self.draws.ended(lease.group)
        self._release(leases)
        rollouts = [entry.counters for entry in self.registry.of_role("rollout")]
        self.pace.counts.last("pipeline/in_flight", self.gate.in_flight)
        self.pace.counts.last("pipeline/free_slots", self.gate.free_slots)
        row = self.pace.row(by_actor.metrics["perf/response_tokens"][1], rollouts)
        self.rows.report(batch, "controller", row)
        if self._early_publication is not None:
            early, self._early_publication = self._early_publication, None
            self._publication(early)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def on_published(self, message: Published, sender: Any) -> None:
        if message.version > self.gate.version:
            # The actor does not wait for the critic; a version counts as published once v has risen to it.
            self._early_publication = message
        else:
            self._publication(message)
        self._turn()

    def _publication(self, message: Published) -> None:
        tag = Manifest.from_json(message.manifest).tag
        self.weights = message
        self.gate.published(message.version)
        self.book.published(tag.version, step=tag.step, digest=tag.digest, size=tag.bytes, created_at=tag.created_at)
        for replica in self.replicas:
            self._announce_to(replica)
        if self.options.ref_update_interval is not None:
            for reference in self.of_role("reference"):
                self.send(reference.endpoint, Announce(message.version, message.manifest))

    def _announce_to(self, replica: Replica) -> None:
        if self.weights is not None:
            replica.announced = time.monotonic()
            self.send(replica.member.endpoint, Announce(self.weights.version, self.weights.manifest))

    # --- a turn ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Everything that may happen now, happens now."""
        if self._finishing or not self._open_for_members.is_set():
            return
        try:
            self._tell_end_of_stream()
            self._issue()
        except DataError as error:  # found while reading ahead: a row that is no prompt
            raise ServiceError(str(error)) from None
        self._commit()
        self.rows.close_due()
        self.book.save(self.ledger)
        if self.gate.finished and self.gate.version == self.gate.next_batch:
            self._finishing = True
            self.spawn(self._finish(), "finish")

    def _tell_end_of_stream(self) -> None:
        if not self._stream_end_told and self.draws.stream_ended:
            self._stream_end_told = True
            self.gate.end(to_come=self.draws.rejected_waiting)

    def _issue(self) -> None:
        if self.gate.published_version is None:
            return
        # A lockstep batch is given out as a whole: its requests are all queued before the engine's first step.
        whole_batch = self.lockstep and self.gate.free_slots == self.gate.slots
        team: list[Replica] = []
        if self.lockstep:
            team = self.replicas.lockstep_team(self.gate.version, time.monotonic(), self.options.peer_timeout)
            if not team or (whole_batch and not self.draws.available(self.options.rollout_batch_size)):
                return
        shares: dict[str, list[GroupOrder]] = {}
        while (draw := self.draws.next()) is not None:
            replica = self._place(draw, team)
            if replica is None:
                break
            shares.setdefault(replica.member.endpoint, []).append(self._lease(draw, replica))
        for endpoint, orders in shares.items():
            self.pace.begin()
            self.send(endpoint, Generate(tuple(orders), together=whole_batch))

    def _place(self, draw: Draw, team: list[Replica]) -> Replica | None:
        candidates = [team[draw.group % len(team)]] if team else self.replicas.with_room()
        held = draw.group if draw.lost else None
        return next((r for r in candidates if self.gate.can_issue(r.version, held)), None)

    def _lease(self, draw: Draw, replica: Replica) -> GroupOrder:
        prompt = draw.prompt
        if not draw.lost and draw.attempt == 0:
            self.book.draw(draw.group, prompt.prompt_id, prompt.epoch, prompt.index)
        lease = self.book.issue(draw.group, replica.member.name, replica.version)
        self.gate.issue(draw.group, replica.version)
        self.draws.issued(draw)
        replica.sampling += 1
        return GroupOrder(lease, prompt.prompt_id, prompt.epoch, prompt.token_ids, prompt.row)

    def _commit(self) -> None:
        actor, advantages = self.of_role("actor"), self.of_role("advantages")
        if not actor or not advantages or not self.gate.can_commit():
            return
        batch = self.gate.commit()
        assert isinstance(batch, Batch)
        leases = self.book.commit(batch.index, batch.groups)
        self.send(advantages[0].endpoint, Assemble(batch.index, leases))
        self._moved = time.monotonic()
        self.log.info("batch_committed", batch=batch.index, groups=len(leases), staleness=max(batch.staleness))

    async def _finish(self) -> None:
        """Every batch is trained: the actor writes what is left to write, the others are sent home."""
        self.activity = "finishing"
        actor = await self.member("actor")
        reply = await self.mailbox.ask(actor.endpoint, Finish(), deadline=self.options.stall_timeout)
        assert isinstance(reply, Finished)
        self.log.info("run_finished", version=reply.version, export=reply.export, batches=self.gate.version)
        deadline = time.monotonic() + END_SECONDS
        while self.rows.open and time.monotonic() < deadline:
            self.rows.close_due()
            await asyncio.sleep(CHECK_SECONDS / 5)
        await self._send_home(Shutdown("the run is finished", failed=False))
        self.end(0)

    async def _send_home(self, word: Shutdown) -> None:
        """Every member learns that the run is over; one that does not listen any more is named and left."""
        members = self.registry.members()
        goodbyes = (self.mailbox.tell(m.endpoint, word, deadline=FAREWELL_SECONDS) for m in members)
        for member, answer in zip(members, await asyncio.gather(*goodbyes, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                self.log.warning("goodbye_not_heard", member=member.name, problem=str(answer))

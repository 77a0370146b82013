"""The pipeline of a run as discrete events: the controller, and around it replicas, stages and a trainer.

The gate is the controller's own class, so what may be issued and committed is decided here by the very rule that
decides it in a run. The rest mirrors the services: a replica is chosen as the controller chooses it, closes admission
at an announcement and drains (or pauses, with partial rollouts), the actor publishes beside its next step.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from relax.gate import Batch, Gate
from relax.gate.placement import Placement
from relax.gate.stragglers import STRIKES, Stragglers
from relax.planner.draws import Draw, Draws, Lengths
from relax.planner.events import Events
from relax.planner.prediction import Prediction
from relax.planner.replica import Replica
from relax.planner.setting import Setting
from relax.planner.slots import Run
from relax.planner.trainer import Trainer

# How often within --straggler-timeout it is asked who blocks a commit.
LOOKS = 20


class PlanError(RuntimeError):
    """The plan contradicts itself or comes to a stop: a fault of Relax, not of the setting."""


class UnusableError(RuntimeError):
    """The run would end by itself: a batch's worth of prompts in a row would be set aside."""


class Pipeline:
    """One run of one setting. `predict` plays it to its end."""

    def __init__(self, setting: Setting, lengths: Lengths) -> None:
        self.setting, self.lengths = setting, lengths
        last = None if setting.batches is None else setting.batches - 1
        spare = (setting.over_sampling or setting.batch_size) - setting.batch_size
        self.gate = Gate(setting.batch_size, setting.max_staleness, setting.lead, last, spare=spare)
        self.draws = Draws(lengths.total)
        self.placement = Placement()
        self._events = Events()
        self.replicas = {
            name: Replica(name, speed, setting, self._events, self._at_end, partial(self._hop, self._serving))
            for name, speed in zip(setting.replicas, setting.speeds, strict=True)
        }
        self.trainer = Trainer(
            setting,
            self._events,
            started=partial(self._hop, self._started),
            trained=partial(self._hop, self._trained),
            stored=partial(self._hop, self._published),
        )
        self._team = sorted(setting.replicas)
        self._lockstep = setting.max_staleness == 0
        self._acknowledged: dict[str, int] = {}
        self._held: dict[str, dict[int, Run]] = {name: {} for name in setting.replicas}  # issued, not sampled
        self._open: dict[int, Run] = {}  # by group, until it is trained or dropped
        self._stream_end_told = False
        timeout = setting.straggler_timeout
        self._stragglers = None if timeout is None else Stragglers(timeout)
        self._next_look = 0.0
        self._will_look = False
        self._unusable_in_a_row = 0
        # What came of it.
        self.issued = self.trained_groups = self.trained_tokens = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_tokens = 0
        self.staleness: Counter[int] = Counter()
        self.began_at: float | None = None  # the first issue

    def predict(self) -> Prediction:
        """Raises UnusableError where the run would give up, PlanError when an invariant does not hold at the end."""
        began = time.perf_counter()
        self._published(0)
        self._events.run()
        self._check()
        assert self.began_at is not None
        s, seconds = self.setting, self.trainer.ended_at - self.began_at
        batches = self.gate.version
        return Prediction(
            setting=s,
            seconds=seconds,
            batches=batches,
            groups=self.trained_groups,
            tokens=self.trained_tokens,
            trainer_idle=1 - self.trainer.busy / seconds if seconds else 0.0,
            slots_idle=1 - sum(r.slots.busy for r in self.replicas.values()) / (seconds * s.slot_seconds),
            staleness=dict(sorted(self.staleness.items())),
            dropped=dict(self.dropped),
            dropped_tokens=self.dropped_tokens,
            dropped_samples=self.dropped.total() * s.samples,
            issued=self.issued,
            events=self._events.count,
            wall_seconds=time.perf_counter() - began,
        )

    def _check(self) -> None:
        gate = self.gate
        if not gate.finished or gate.version != gate.next_batch:
            raise PlanError(f"the plan stopped after {gate.version} batches: {gate.blocked()}")
        ended = self.trained_groups + self.dropped.total()
        if self.issued != ended + gate.in_flight:
            raise PlanError(f"{self.issued} draws were issued, {ended} ended and {gate.in_flight} are in flight")
        if max(self.staleness, default=0) > self.setting.max_staleness:
            raise PlanError(f"a group of staleness {max(self.staleness)} was trained")

    def _hop(self, act: Callable[..., None], *args: Any) -> None:
        """`act` when a message sent now has come."""
        self._events.after(self.setting.hop_seconds, act, *args)

    # --- controller --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Everything that may happen now, happens now, in the order in which the controller does it."""
        if not self._stream_end_told and self.draws.stream_ended:
            self._stream_end_told = True
            self.gate.end(to_come=self.draws.waiting)
        if self._stragglers is not None:
            if self._events.now >= self._next_look:
                self._look(self._stragglers)
            else:
                self._look_later()
        self._commit()
        self._issue()

    def _look(self, stragglers: Stragglers) -> None:
        """Drop what has blocked a commit for too long. To ask costs as much as there are open groups, so it is asked
        often within a timeout and not at every event."""
        if self.gate.can_commit():
            return
        blocked = self.gate.blocked()
        overdue = stragglers.overdue(blocked, self._events.now)
        pause = stragglers.timeout / LOOKS
        self._next_look = self._events.now + pause
        if blocked.groups and pause > 0:
            self._look_later()
        # Only what is still to be sampled can be a straggler: the way from there is no longer for another draw.
        late = [group for group in overdue if self._is_sampled_now(group)]
        coming = sum(not self._is_sampled_now(group) for group in blocked.groups)
        if late := late[: max(0, blocked.needed - coming)]:
            self._give_up(late)

    def _is_sampled_now(self, group: int) -> bool:
        return group in self._held[self._open[group].holder]

    def _give_up(self, groups: Iterable[int]) -> None:
        """These draws end; their prompts are drawn again, or leave the run where that happened too often."""
        reasons = {}
        for group in groups:
            draw, holder = self._open[group].draw, self._open[group].holder
            again = draw.attempt + 1 < STRIKES
            self.gate.drop(group, again=again)
            if again:
                self.draws.again(draw, holder)
            else:
                self._unusable_in_a_row += 1
            reasons[group] = "straggler" if again else "set_aside"
        if self._unusable_in_a_row >= self.setting.batch_size:
            told = f"{self._unusable_in_a_row} prompts in a row were too slow for --straggler-timeout"
            raise UnusableError(f"{told} {self.setting.straggler_timeout:g} three times each")
        # Last: a replica that becomes free by it may report at once, and the next turn begins.
        self._cancel(reasons)

    def _look_later(self) -> None:
        if not self._will_look:
            self._will_look = True
            self._events.after(self._next_look - self._events.now, self._look_now)

    def _look_now(self) -> None:
        self._will_look = False
        self._turn()

    def _issue(self) -> None:
        if not (self.draws.waiting or self.gate.free_slots > 0):
            return
        team: list[str] = []
        if self._lockstep:
            team = self._team
            if any(self._acknowledged.get(name) != self.gate.version for name in team):
                return
        for redrawn in self.draws.redrawn():
            self._issue_one(redrawn, team)
        while (draw := self.draws.next()) is not None and self._issue_one(draw, team):
            pass

    def _issue_one(self, draw: Draw, team: list[str]) -> bool:
        place = self._place(draw, team)
        if place is None:
            return False
        if self.began_at is None:
            self.began_at = self._events.now
        name, version = place
        self.gate.issue(draw.group, version)
        self.draws.issued(draw)
        run = self._open[draw.group] = Run(draw, name, self.lengths.of(draw.place, draw.attempt))
        self._held[name][draw.group] = run
        self.issued += 1
        self.placement.took(name)
        self._hop(self.replicas[name].arrive, run)
        return True

    def _place(self, draw: Draw, team: list[str]) -> tuple[str, int] | None:
        if team:
            place = team[(draw.group + draw.attempt) % len(team)], self.gate.version
            return place if self.gate.can_issue(place[1]) else None
        return self.placement.choose(self.gate.can_issue, draw.avoids if len(self.replicas) > 1 else "")

    def _commit(self) -> None:
        if not self.gate.can_commit():
            return
        batch = self.gate.commit()
        assert isinstance(batch, Batch)
        if batch.surplus:
            self.draws.give_back([self._open[group].draw for group in batch.surplus])
            self._cancel(dict.fromkeys(batch.surplus, "surplus"))
        # To advantages, which assembles it, and on to the actor.
        self._events.after(2 * self.setting.hop_seconds, self.trainer.take, batch)

    def _cancel(self, reasons: dict[int, str]) -> None:
        """These groups are dropped, each for its reason; what runs of them ends when their replicas hear of it."""
        at: dict[str, set[int]] = {}
        for group, reason in reasons.items():
            run = self._open.pop(group)
            run.cancelled = True
            self.dropped[reason] += 1
            self.dropped_tokens += sum(run.tokens)
            if self._held[run.holder].pop(group, None) is not None:
                self.placement.gave(run.holder)
                at.setdefault(run.holder, set()).add(group)
        for name, held in at.items():
            self._hop(self.replicas[name].release, held)

    # --- what the replicas say ---------------------------------------------------------------------------------------

    def _at_end(self, run: Run) -> None:
        self._hop(self._sampled, run)
        self._events.after(self.setting.hop_seconds + self._way_to_ready, self._ready, run)

    def _sampled(self, run: Run) -> None:
        if run.cancelled:
            return
        group = run.draw.group
        del self._held[run.holder][group]
        self.placement.gave(run.holder)
        self.gate.sampled(group, run.oldest)
        if self._way_to_ready > 0:
            self._turn()

    def _ready(self, run: Run) -> None:
        if run.cancelled:
            return
        self.gate.ready(run.draw.group, run.oldest)
        self._unusable_in_a_row = 0
        self._turn()

    @property
    def _way_to_ready(self) -> float:
        """From a replica by reward and advantages to the controller: three messages, of which the report of the
        sampling took one."""
        return 2 * self.setting.hop_seconds + self.setting.score_seconds

    def _serving(self, name: str, version: int, running: frozenset[int]) -> None:
        self._acknowledged[name] = version
        self.placement.serves(name, version, self.setting.credit)
        for group in self._held[name]:
            if group not in running:
                self.gate.acknowledged(group, version)
        self._turn()

    # --- what the trainer says ---------------------------------------------------------------------------------------

    def _started(self, batch: Batch) -> None:
        self.gate.started(batch.index)
        self._turn()

    def _trained(self, batch: Batch) -> None:
        self.gate.trained(batch.index)
        self.staleness.update(batch.staleness)
        self.trained_groups += len(batch.groups)
        for group in batch.groups:
            self.trained_tokens += sum(self._open.pop(group).tokens)
        self._turn()

    def _published(self, version: int) -> None:
        self.gate.published(version)
        for replica in self.replicas.values():
            self._hop(replica.announce, version)
        self._turn()

"""The pipeline of a run as discrete events: controller, replicas, stages, trainer and publisher around the gate.

The gate is the controller's own class, so what may be issued and committed is decided here by the very rule that
decides it in a run. The rest mirrors the services: a replica is chosen as the controller chooses it, closes admission
at an announcement and drains (or pauses, with partial rollouts), the actor publishes beside its next step.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy

from relax.gate import Batch, Gate
from relax.gate.placement import Placement
from relax.gate.stragglers import STRIKES, Stragglers
from relax.planner.draws import Draws, Lengths
from relax.planner.prediction import Prediction
from relax.planner.setting import Setting
from relax.planner.slots import Run, Slots

# How often within --straggler-timeout it is asked who blocks a commit.
LOOKS = 20


class PlanError(RuntimeError):
    """The plan contradicts itself or comes to a stop: a fault of Relax, not of the setting."""


class UnusableError(RuntimeError):
    """The run would end by itself: a batch's worth of prompts in a row would be set aside."""


class Replica:
    """A replica as its own process sees it. `version` is the one it serves, `newest` the one announced last."""

    def __init__(self, name: str, slots: Slots) -> None:
        self.name, self.slots = name, slots
        self.version = self.newest = -1
        self.loading = False
        self.waiting: deque[Run] = deque()  # for admission

    @property
    def open(self) -> bool:
        return not self.loading and self.version == self.newest >= 0


class Pipeline:
    """One run of one setting. `predict` plays it to its end."""

    def __init__(self, setting: Setting, lengths: Lengths) -> None:
        self.setting, self.lengths = setting, lengths
        last = None if setting.batches is None else setting.batches - 1
        spare = (setting.over_sampling or setting.batch_size) - setting.batch_size
        self.gate = Gate(setting.batch_size, setting.max_staleness, setting.lead, last, spare=spare)
        self.draws = Draws(lengths.total)
        self.placement = Placement()
        self.replicas = {
            name: Replica(name, Slots(setting.slots, speed))
            for name, speed in zip(setting.replicas, setting.speeds, strict=True)
        }
        self._team = sorted(setting.replicas)
        self._lockstep = setting.max_staleness == 0
        self._env = simpy.Environment()
        self._acknowledged: dict[str, int] = {}
        self._held: dict[str, dict[int, Run]] = {name: {} for name in setting.replicas}  # issued, not sampled
        self._open: dict[int, Run] = {}  # by group, until it is trained or dropped
        self._to_train = simpy.Store(self._env)
        self._stream_end_told = False
        self._wanted, self._publishing = 0, False
        timeout = setting.straggler_timeout
        self._stragglers = None if timeout is None else Stragglers(timeout)
        self._next_look = 0.0
        self._will_look = False
        self._unusable_in_a_row = 0
        # What came of it.
        self.events = self.issued = self.trained_groups = self.trained_tokens = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_tokens = 0
        self.staleness: Counter[int] = Counter()
        self.train_busy = 0.0
        self.began_at: float | None = None  # the first issue
        self.ended_at = 0.0  # of the last batch trained

    def predict(self) -> Prediction:
        """Raises UnusableError where the run would give up, PlanError when an invariant does not hold at the end."""
        began = time.perf_counter()
        self._env.process(self._train())
        self._announce(0)
        self._env.run()
        self._check()
        assert self.began_at is not None
        s, seconds = self.setting, self.ended_at - self.began_at
        batches = self.gate.version
        return Prediction(
            setting=s,
            seconds=seconds,
            batches=batches,
            groups=self.trained_groups,
            tokens=self.trained_tokens,
            trainer_idle=1 - self.train_busy / seconds if seconds else 0.0,
            slots_idle=1 - sum(r.slots.busy for r in self.replicas.values()) / (seconds * s.slot_seconds),
            staleness=dict(sorted(self.staleness.items())),
            dropped=dict(self.dropped),
            dropped_tokens=self.dropped_tokens,
            dropped_samples=self.dropped.total() * s.samples,
            issued=self.issued,
            events=self.events,
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

    def _after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        if seconds <= 0:
            act(*args)
            return
        self.events += 1
        self._env.timeout(seconds).callbacks.append(lambda _: act(*args))

    # --- controller --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Everything that may happen now, happens now, in the order in which the controller does it."""
        if not self._stream_end_told and self.draws.stream_ended:
            self._stream_end_told = True
            self.gate.end(to_come=self.draws.waiting)
        if self._stragglers is not None:
            if self._env.now >= self._next_look:
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
        overdue = stragglers.overdue(blocked, self._env.now)
        pause = stragglers.timeout / LOOKS
        self._next_look = self._env.now + pause
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
            draw = self._open[group].draw
            again = draw.attempt + 1 < STRIKES
            self.gate.drop(group, again=again)
            if again:
                self.draws.again(draw)
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
            self._after(self._next_look - self._env.now, self._look_now)

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
        while (draw := self.draws.next()) is not None:
            place = self._place(draw.group, team)
            if place is None:
                return
            if self.began_at is None:
                self.began_at = self._env.now
            name, version = place
            self.gate.issue(draw.group, version)
            self.draws.issued(draw)
            run = self._open[draw.group] = Run(draw, name, self.lengths.of(draw.place, draw.attempt))
            self._held[name][draw.group] = run
            self.issued += 1
            self.placement.took(name)
            self._after(self.setting.hop_seconds, self._arrive, self.replicas[name], run)

    def _place(self, group: int, team: list[str]) -> tuple[str, int] | None:
        if team:
            place = team[group % len(team)], self.gate.version
            return place if self.gate.can_issue(place[1]) else None
        return self.placement.choose(self.gate.can_issue)

    def _commit(self) -> None:
        if not self.gate.can_commit():
            return
        batch = self.gate.commit()
        assert isinstance(batch, Batch)
        if batch.surplus:
            self.draws.give_back([self._open[group].draw for group in batch.surplus])
            self._cancel(dict.fromkeys(batch.surplus, "surplus"))
        # To advantages, which assembles it, and on to the actor.
        self._after(2 * self.setting.hop_seconds, self._hand_over, batch)

    def _hand_over(self, batch: Batch) -> None:
        self._to_train.put(batch)

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
            self._after(self.setting.hop_seconds, self._released, self.replicas[name], held)

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

    # --- replicas ----------------------------------------------------------------------------------------------------

    def _arrive(self, replica: Replica, run: Run) -> None:
        if run.cancelled:
            return
        if replica.open:
            self._enter(replica, run)
        else:
            replica.waiting.append(run)

    def _enter(self, replica: Replica, run: Run) -> None:
        run.oldest = replica.version
        replica.slots.enter(run, self._env.now)
        self._expect(replica, run)

    def _expect(self, replica: Replica, run: Run) -> None:
        self.events += 1
        end = run.end
        self._env.timeout(end - self._env.now).callbacks.append(lambda _: self._end(replica, run, end))

    def _end(self, replica: Replica, run: Run, expected: float) -> None:
        if run.cancelled or run.end != expected:
            return
        replica.slots.leave(run)
        self._after(self.setting.hop_seconds, self._sampled, run)
        self._after(self.setting.hop_seconds + self._way_to_ready, self._ready, run)
        self._update(replica)

    def _released(self, replica: Replica, groups: set[int]) -> None:
        for run in replica.slots.cancel(groups, self._env.now):
            self._expect(replica, run)
        self._update(replica)

    def _announced(self, replica: Replica, version: int) -> None:
        replica.newest = max(replica.newest, version)
        self._update(replica)

    def _update(self, replica: Replica) -> None:
        """Load what was announced last, once nothing runs; with partial rollouts at once."""
        if replica.loading or replica.version == replica.newest:
            return
        seconds = self.setting.load_seconds
        if self.setting.partial_rollout:
            if seconds > 0:
                for run in replica.slots.pause(seconds, self._env.now):
                    self._expect(replica, run)
        elif replica.slots.running:
            return
        replica.loading = True
        self._after(seconds, self._loaded, replica, replica.newest)

    def _loaded(self, replica: Replica, version: int) -> None:
        replica.version, replica.loading = version, False
        now, running = self._env.now, set()
        for run in replica.slots.running.values():
            if min(run.starts) < now:
                running.add(run.draw.group)
            if min(run.ends if self.setting.mask_offpolicy else run.starts) >= now:
                # Its first token, or every sample's newest version, is of these weights.
                run.oldest = version
        self._after(self.setting.hop_seconds, self._serving, replica.name, version, frozenset(running))
        self._update(replica)
        while replica.waiting and replica.open:
            run = replica.waiting.popleft()
            if not run.cancelled:
                self._enter(replica, run)

    # --- trainer -----------------------------------------------------------------------------------------------------

    def _train(self) -> Generator[simpy.Event, Any, None]:
        setting = self.setting
        while True:
            batch: Batch = yield self._to_train.get()
            self._after(setting.hop_seconds, self._started, batch)
            self.train_busy += setting.train_seconds
            self.events += 2
            yield self._env.timeout(setting.train_seconds)
            self.ended_at = self._env.now
            self._after(setting.hop_seconds, self._trained, batch)
            version = batch.index + 1
            if version % setting.interval == 0:
                self._wanted = version
                self._publish()

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

    def _publish(self) -> None:
        """Beside the next step; what a newer version overtakes meanwhile is skipped."""
        if not self._publishing:
            self._publishing = True
            self._after(self.setting.publish_seconds, self._stored, self._wanted)

    def _stored(self, version: int) -> None:
        self._publishing = False
        self._after(self.setting.hop_seconds, self._announce, version)
        if self._wanted > version:
            self._publish()

    def _announce(self, version: int) -> None:
        self.gate.published(version)
        for replica in self.replicas.values():
            self._after(self.setting.hop_seconds, self._announced, replica, version)
        self._turn()

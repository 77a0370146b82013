"""A small world around the gate: a controller, replicas that lag and die, stages that lose things, a trainer.

It keeps its own books of what truly happened (which version sampled which token, which batch trained which group) and
checks the gate against them after every event. A history is an adversarial stretch, in which anything may happen in any
order, and then a fair one without new trouble, in which the run must end by itself.
"""

import random
from dataclasses import dataclass, field

from relax.gate import Batch, Gate

PACES = (0.03, 0.3, 1.0, 3.0)
# Seldom enough for batches to get through.
TROUBLE = dict.fromkeys(("kill", "lose", "lose_committed", "park", "hand_back", "straggle", "filter"), 0.1)


class DeadlockError(AssertionError):
    """The run is not over and nothing can happen any more, or it goes on for ever."""


class BoundError(AssertionError):
    """A sample was committed to a batch that is too late for it."""


class SlotsError(AssertionError):
    """More groups are held than there are slots."""


@dataclass(frozen=True)
class Setting:
    batch_size: int = 2
    max_staleness: int = 1
    lead: int = 1
    interval: int = 1
    replicas: int = 2
    batches: int | None = 4  # num_rollout
    stream: int | None = None  # groups in the stream, None: endless
    spare: int = 0  # groups issued beyond P, lockstep only
    partial: bool = False  # running groups survive an update of their replica
    first_token: bool = True  # the controller hears of first tokens, not only of finished groups
    early_start: bool = False  # the actor may start a batch before the critic has finished the one before
    first_batch: int = 0
    trouble: int = 60  # adversarial events
    seed: int = 0


@dataclass
class Replica:
    alive: bool = True
    loaded: int | None = None
    acknowledged: int | None = None


@dataclass
class Life:
    """What truly happened to an open group."""

    holder: int | None
    oldest: int | None = None
    finished: bool = False
    ready: bool = False
    ready_at: int = 0  # counts up


@dataclass
class World:
    setting: Setting
    gate: Gate
    rng: random.Random
    replicas: list[Replica]
    groups: dict[int, Life] = field(default_factory=dict)
    retries: list[int] = field(default_factory=list)
    drawn: int = 0
    ended: bool = False
    ahead: tuple[Batch, dict[int, Life]] | None = None
    training: list[Batch] = field(default_factory=list)
    trained: dict[int, int] = field(default_factory=dict)  # group -> batch
    sizes: dict[int, int] = field(default_factory=dict)
    unpublished: list[int] = field(default_factory=list)
    gone: int = 0  # groups dropped for good
    readied: int = 0
    surplus: int = 0
    staleness: list[int] = field(default_factory=list)
    strict: bool = True  # also compare every count of the gate with these books
    pace: dict[str, float] = field(default_factory=dict)

    # --- what may happen: each returns its possible targets --------------------------------------------------------

    def progress(self, fair: bool) -> dict[str, list]:
        gate, newest = self.gate, self.gate.published_version
        alive = [i for i, r in enumerate(self.replicas) if r.alive]
        # In the fair stretch a replica closes admission when it has weights to load, so that it drains.
        serving = [i for i in alive if (v := self.replicas[i].acknowledged) is not None and not (fair and v != newest)]
        running = {i: [g for g, x in self.groups.items() if x.holder == i and not x.finished] for i in alive}
        held = [g for groups in running.values() for g in groups]
        lost = [g for g, x in self.groups.items() if x.holder is None and not x.ready and not x.finished]
        version = {i: self.replicas[i].acknowledged for i in serving}
        return {
            "publish": self.unpublished if fair else self.unpublished[-1:],
            "load": [
                i
                for i in alive
                if newest is not None
                and (self.replicas[i].loaded is None or self.replicas[i].loaded < newest)
                and (self.setting.partial or all(self.groups[g].oldest is None for g in running[i]))
            ],
            "acknowledge": [i for i in alive if self.replicas[i].acknowledged != self.replicas[i].loaded],
            "issue": [i for i in serving if self._may_draw() and gate.can_issue(version[i])],
            "issue_again": [(g, i) for g in lost for i in serving if gate.can_issue(version[i], g)],
            "token": [g for g in held if not fair or self.groups[g].oldest is None],
            "finish": [g for g in held if self.groups[g].oldest is not None],
            "ready": [g for g, x in self.groups.items() if x.finished and not x.ready],
            "commit": [None] if gate.can_commit() else [],
            "start": [None] if self.ahead and (not self.training or self.setting.early_start) else [],
            "train": [None] if self.training else [],
            "revive": [i for i, r in enumerate(self.replicas) if not r.alive],
        }

    def trouble(self) -> dict[str, list]:
        pending = [g for g, x in self.groups.items() if not x.ready]
        return {
            "kill": [i for i, r in enumerate(self.replicas) if r.alive],
            "lose": [g for g, x in self.groups.items() if x.finished],
            "lose_committed": list(self.ahead[1]) if self.ahead else [],
            "park": [g for g, x in self.groups.items() if self.setting.partial and x.holder is not None],
            "hand_back": [g for g, x in self.groups.items() if x.holder is not None and not x.finished],
            "straggle": pending,
            "filter": [g for g, x in self.groups.items() if x.finished],
        }

    # --- the events ------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        self.unpublished = [v for v in self.unpublished if v > version]
        self.gate.published(version)

    def load(self, i: int) -> None:
        self.replicas[i].loaded = self.gate.published_version

    def acknowledge(self, i: int) -> None:
        replica = self.replicas[i]
        replica.acknowledged = replica.loaded
        for group, life in self.groups.items():
            if life.holder == i and not life.finished and life.oldest is None:
                self.gate.acknowledged(group, replica.loaded)

    def issue(self, i: int) -> None:
        group = self.retries.pop(0) if self.retries else self._draw()
        self.groups[group] = Life(holder=i)
        self.gate.issue(group, self.replicas[i].acknowledged)

    def issue_again(self, target: tuple[int, int]) -> None:
        group, i = target
        self.gate.issue(group, self.replicas[i].acknowledged)
        self.groups[group].holder = i

    def token(self, group: int) -> None:
        life = self.groups[group]
        version = self.replicas[life.holder].loaded
        life.oldest = version if life.oldest is None else min(life.oldest, version)
        if self.setting.first_token or self.setting.partial:
            self.gate.sampled(group, life.oldest)

    def finish(self, group: int) -> None:
        self.groups[group].finished = True

    def ready(self, group: int) -> None:
        self.readied += 1
        self.groups[group].ready, self.groups[group].ready_at = True, self.readied
        self.gate.ready(group, self.groups[group].oldest)

    def commit(self, _: None) -> None:
        setting, gate = self.setting, self.gate
        ready = [(g, x) for g, x in self.groups.items() if x.ready]
        candidates = sorted((x.oldest, x.ready_at if setting.spare else g, g) for g, x in ready)
        batch = gate.commit()
        assert isinstance(batch, Batch)
        for group, oldest in zip(batch.groups, batch.oldest, strict=True):
            life = self.groups[group]
            assert life.ready
            assert oldest == life.oldest
            if batch.index - life.oldest > setting.max_staleness:
                raise BoundError(f"group {group} of version {life.oldest} in batch {batch.index}")
        if self.strict:
            assert set(batch.groups) == {g for *_, g in candidates[: len(batch.groups)]}, "not the most urgent"
        assert batch.groups == tuple(sorted(batch.groups))
        self.ahead = batch, {g: self.groups.pop(g) for g in batch.groups}
        for group in batch.surplus:
            self.groups.pop(group)
        self.surplus += len(batch.surplus)
        self.retries = [*batch.surplus, *self.retries]
        self.sizes[batch.index] = len(batch.groups)

    def start(self, _: None) -> None:
        batch, _members = self.ahead
        self.ahead = None
        self.training.append(batch)
        self.gate.started(batch.index)

    def train(self, _: None) -> None:
        batch = self.training.pop(0)
        assert batch.index == self.gate.version, "batches are trained in order"
        for group in batch.groups:
            assert group not in self.trained, "trained twice"
            self.trained[group] = batch.index
        self.staleness += batch.staleness
        self.gate.trained(batch.index)
        last = self.gate.finished and not self.training and not self.ahead
        if self.gate.version % self.setting.interval == 0 or last:
            self.unpublished.append(self.gate.version)

    def revive(self, i: int) -> None:
        self.replicas[i] = Replica()

    def kill(self, i: int) -> None:
        self.replicas[i].alive = False
        for group, life in self.groups.items():
            if life.holder == i and not life.finished:
                self._lose(
                    group, life, keep=self.setting.partial and life.oldest is not None and self.rng.random() < 0.5
                )

    def park(self, group: int) -> None:
        life = self.groups[group]
        if not life.finished:
            self._lose(group, life, keep=life.oldest is not None)

    def hand_back(self, group: int) -> None:
        life = self.groups[group]
        keep = self.setting.partial and life.oldest is not None and self.rng.random() < 0.5
        self._lose(group, life, keep=keep)

    def lose(self, group: int) -> None:
        self._lose(group, self.groups[group], keep=False)

    def lose_committed(self, group: int) -> None:
        batch, members = self.ahead
        self.ahead = None
        self.groups.update(members)
        self.gate.take_back(batch.index, [group])
        self.groups[group] = Life(holder=None)

    def straggle(self, group: int) -> None:
        del self.groups[group]
        again = self.rng.random() < 0.7
        self.gate.drop(group, again=again)
        if again:
            self.retries.append(group)
        else:
            self.gone += 1

    def filter(self, group: int) -> None:
        del self.groups[group]
        self.gone += 1
        self.gate.drop(group)

    def _lose(self, group: int, life: Life, keep: bool) -> None:
        life.holder, life.finished, life.ready = None, False, False
        life.oldest = life.oldest if keep else None
        self.gate.unassign(group, keep_tokens=keep)

    def _may_draw(self) -> bool:
        return bool(self.retries) or self.setting.stream is None or self.drawn < self.setting.stream

    def _draw(self) -> int:
        self.drawn += 1
        return self.drawn - 1

    # --- the run ---------------------------------------------------------------------------------------------------

    def over(self) -> bool:
        return self.gate.finished and not self.ahead and not self.training and not self.unpublished

    def check(self) -> None:
        setting, gate = self.setting, self.gate
        P, S = setting.batch_size, setting.max_staleness
        newest = gate.published_version
        shown = -1 if newest is None else newest
        used = len(self.groups) + sum(size for b, size in self.sizes.items() if b + 1 > shown)
        if self.ahead is None and gate.next_batch in self.sizes:
            used -= self.sizes[gate.next_batch]  # it was taken back: its members are open again
        slots = (setting.lead + 1) * P + setting.spare
        if used > slots:
            raise SlotsError(f"{used} groups held, {slots} slots")
        assert not self.strict or gate.free_slots == gate.slots - used
        assert gate.in_flight == len(self.groups)
        assert gate.ready_groups == sum(x.ready for x in self.groups.values())
        deadlines = []
        for group, life in self.groups.items():
            deadline = gate.deadline(group)
            if life.oldest is not None:
                assert deadline is not None
                assert deadline <= life.oldest + S
                assert deadline == life.oldest + S or not life.ready
            assert (deadline is None) == (life.holder is None and life.oldest is None)
            deadlines.append(float("inf") if deadline is None else deadline)
        last = float("inf") if gate.last_batch is None else gate.last_batch
        for w in sorted(set(deadlines)):
            n = sum(d <= w for d in deadlines)
            if n > P * max(0, min(w, last) - gate.next_batch + 1) + setting.spare:
                raise BoundError(f"n({w}) = {n}, next batch {gate.next_batch}, last {last}, deadlines {deadlines}")

    def step(self, fair: bool) -> bool:
        events = self.progress(fair) | ({} if fair else self.trouble())
        kinds = [kind for kind, targets in events.items() if targets]
        if not kinds:
            return False
        # Every history has its own paces: slow trainers, replicas that lag, stages that lag, storms of trouble.
        weights = [self.pace.setdefault(kind, self.rng.choice(PACES)) * TROUBLE.get(kind, 1.0) for kind in kinds]
        kind = self.rng.choices(kinds, weights)[0]
        getattr(self, kind)(self.rng.choice(events[kind]))
        if self.setting.stream is not None and not self.ended and self.drawn == self.setting.stream:
            self.ended = True
            self.gate.end(to_come=len(self.retries))
        return True


def run(setting: Setting, gate_class: type[Gate] = Gate, *, strict: bool = True) -> World:
    """Plays one history to its end; raises BoundError, SlotsError, DeadlockError or AssertionError."""
    last = None if setting.batches is None else setting.first_batch + setting.batches - 1
    gate = gate_class(
        setting.batch_size,
        setting.max_staleness,
        setting.lead,
        last,
        first_batch=setting.first_batch,
        spare=setting.spare,
    )
    replicas = [Replica() for _ in range(setting.replicas)]
    world = World(
        setting, gate, random.Random(setting.seed), replicas, unpublished=[setting.first_batch], strict=strict
    )
    for _ in range(setting.trouble):
        if world.over() or not world.step(fair=False):
            break
        world.check()
    limit = 400 + 60 * (setting.batches or 0) * setting.batch_size + 60 * (setting.stream or 0)
    for _ in range(limit):
        if world.over():
            break
        if not world.step(fair=True):
            raise DeadlockError(f"nothing can happen; {gate.commit()}; outstanding {gate.outstanding()}")
        world.check()
    else:
        raise DeadlockError(f"no end after {limit} fair events")
    return world

"""A run in one process that is killed and resumed: real gate, book, draws, ledger files and checkpoints.

What a controller does in its turns, done here in random order: replicas that lag and die, groups that are lost,
rejected and filtered, publications and checkpoints under way, and at any moment the end of it all. The model is the
number of batches it was trained on.
"""

import contextlib
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from relax.checkpoints import CheckpointDirectory, Writing
from relax.data import Position, Prompt, PromptReader
from relax.gate import Batch, Gate
from relax.ledger import GroupBook, Ledger, State
from relax.ledger.queries import conservation, read, trained_prompts, whereabouts
from relax.ledger.resume import reopen, resume, set_aside
from relax.services.control.draws import Draw, Draws, revived_draws

FILTERED, STRAGGLER, SET_ASIDE, SURPLUS = "filtered", "straggler", "set_aside", "surplus"


@dataclass(frozen=True)
class Setting:
    prompts: int = 5
    epochs: int | None = 2
    batches: int | None = None  # num_rollout
    batch_size: int = 2
    max_staleness: int = 1
    lead: int = 1
    interval: int = 1  # of publication
    spare: int = 0
    save_interval: int = 2
    replicas: int = 2
    drops: bool = True  # groups are filtered and rejected
    late_copy: bool = False  # the ledger is copied some turns after the cut
    deaths: tuple[int, ...] = (40,)  # events in each life that ends by kill -9; the last life ends by itself
    seed: int = 0


class Stream:
    """PromptStream without its thread."""

    def __init__(self, reader: PromptReader, at: Position, epochs: int | None) -> None:
        self._reader, self._at, self._epochs = reader, at, epochs
        self._settle()

    def _settle(self) -> None:
        if self._at.index == len(self._reader.source):
            self._at = Position(self._at.epoch + 1, 0)

    @property
    def ended(self) -> bool:
        return self._at.epoch == self._epochs

    def take(self) -> Prompt | None:
        if self.ended:
            return None
        epoch, index = self._at.epoch, self._at.index
        prompt = self._reader.prompt(int(self._reader.order(epoch)[index]), epoch, index)
        self._at = Position(epoch, index + 1)
        self._settle()
        return prompt


@dataclass
class Replica:
    version: int | None = None
    holds: set[int] = field(default_factory=set)


class Life:
    """One lineage, from its start or a checkpoint to its death or the end of the run."""

    def __init__(self, path: Path, setting: Setting, lineage: int, reader: PromptReader, rng: random.Random) -> None:
        s = self.setting = setting
        self.rng, self.path = rng, path
        self.checkpoints = CheckpointDirectory(path / "checkpoints", keep=2)
        newest = self.checkpoints.newest() if lineage else None
        self.cut = cut = 0 if newest is None else newest.batch
        self.book, self.draws = GroupBook(lineage), Draws()
        ledger = path / "ledger.sqlite"
        if newest is None:
            set_aside(ledger, lineage)
            self.ledger = Ledger(ledger, run_id="r", lineage=lineage)
            self.draws.begin(Stream(reader, Position(), s.epochs))
        else:
            assert newest.part("model").joinpath("steps").read_text() == str(cut)
            copy = newest.part("ledger") / "ledger.sqlite"
            revived = resume(copy, cut)
            reopen(copy, ledger, cut=cut, lineage=lineage)
            self.ledger = Ledger.reopened(ledger, run_id="r", lineage=lineage, first_batch=cut)
            self.book.revive(revived)
            at = Position(revived.epoch, revived.index)
            self.draws.begin(
                Stream(reader, at, s.epochs), revived_draws(revived, reader), next_group=revived.last_group + 1
            )
        last = None if s.batches is None else s.batches - 1
        self.gate = Gate(s.batch_size, s.max_staleness, s.lead, last, first_batch=cut, spare=s.spare)
        self.replicas = [Replica() for _ in range(s.replicas)]
        self.oldest: dict[int, int] = {}  # truth about the tokens of groups that are ready
        self.unpublished = [cut]
        self.ahead: Batch | None = None
        self.training: Batch | None = None
        self.waiting: int | None = None  # a cut whose ledger is still to be copied
        self.writing: tuple[Writing, Future[None]] | None = None
        self.end_told = False
        self.save()

    # --- what may happen ---------------------------------------------------------------------------------------------

    def events(self, fair: bool) -> dict[str, list]:
        gate = self.gate
        held = [(r, group) for r in self.replicas for group in sorted(r.holds)]
        newest = gate.published_version
        may = {
            "publish": self.unpublished[-1:],
            "acknowledge": [r for r in self.replicas if r.version != newest and (not r.holds or not fair)],
            "issue": [None],
            "ready": held,
            "commit": [None] if gate.can_commit() else [],
            "start": [None] if self.ahead and self.training is None else [],
            "train": [None] if self.training else [],
            "copy": [None] if self.waiting is not None and self.writing is None else [],
            "complete": [None] if self.writing else [],
        }
        # A replica that has not loaded newer weights may hold groups; it takes no more than the gate lets it.
        may["acknowledge"] = [r for r in may["acknowledge"] if newest is not None and not r.holds]
        if not fair:
            may["kill"] = [r for r in self.replicas if r.version is not None]
            if self.setting.drops:
                may["reject"] = held
                may["filter"] = held
        return {name: targets for name, targets in may.items() if targets}

    def step(self, fair: bool) -> None:
        events = self.events(fair)
        weights = {"kill": 0.05, "reject": 0.1, "filter": 0.1, "issue": 0.5, "complete": 0.4, "copy": 0.2}
        name = self.rng.choices(list(events), [weights.get(name, 1.0) for name in events])[0]
        getattr(self, name)(self.rng.choice(events[name]))
        if not self.end_told and self.draws.stream_ended:
            self.end_told = True
            self.gate.end(to_come=self.draws.coming_back)
        self.save()

    def save(self) -> None:
        while not self.book.save(self.ledger):
            self.ledger.flush(10)

    @property
    def over(self) -> bool:
        gate = self.gate
        idle = self.ahead is None and self.training is None and self.waiting is None and self.writing is None
        return gate.finished and gate.version == gate.next_batch and idle

    # --- the events --------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        self.unpublished = []
        self.gate.published(version)

    def acknowledge(self, replica: Replica) -> None:
        replica.version = self.gate.published_version

    def issue(self, _: None) -> None:
        if self.gate.published_version is None:
            return
        for draw in self.draws.again():
            self._place(draw)
        for draw in self.draws.fresh():
            if not self._place(draw):
                break

    def _place(self, draw: Draw) -> bool:
        held = draw.group if draw.lost else None
        for replica in self.replicas:
            if replica.version is not None and self.gate.can_issue(replica.version, held):
                if draw.group not in self.book:
                    prompt = draw.prompt
                    self.book.draw(draw.group, prompt.prompt_id, prompt.epoch, prompt.index)
                record = self.book[draw.group]
                drawn = (draw.prompt.prompt_id, draw.prompt.epoch, draw.attempt)
                assert (record.prompt_id, record.epoch, record.attempt) == drawn
                self.book.issue(draw.group, "rollout", replica.version)
                self.gate.issue(draw.group, replica.version)
                self.draws.issued(draw)
                replica.holds.add(draw.group)
                return True
        return False

    def ready(self, target: tuple[Replica, int]) -> None:
        replica, group = target
        assert replica.version is not None
        replica.holds.remove(group)
        self.oldest[group] = replica.version
        self.book.advance(self.book.lease(group), State.READY, oldest=replica.version, tokens=1)
        self.gate.ready(group, replica.version)

    def kill(self, replica: Replica) -> None:
        for group in sorted(replica.holds):
            self.book.lost(group, "killed")
            self.gate.unassign(group)
            self.draws.lost(group)
        replica.version, replica.holds = None, set()

    def reject(self, target: tuple[Replica, int]) -> None:
        replica, group = target
        replica.holds.remove(group)
        again = self.draws.rejected(group)
        self.gate.drop(group, again=again)
        self.book.drop(group, STRAGGLER if again else SET_ASIDE, self.gate.version, again=again)
        if not again:
            self.draws.ended(group)

    def filter(self, target: tuple[Replica, int]) -> None:
        replica, group = target
        replica.holds.remove(group)
        self.gate.drop(group)
        self.book.drop(group, FILTERED, self.gate.version)
        self.draws.ended(group)

    def commit(self, _: None) -> None:
        batch = self.gate.commit()
        assert isinstance(batch, Batch)
        for group in batch.groups:
            assert batch.index - self.oldest[group] <= self.setting.max_staleness
            assert self.oldest[group] >= self.cut - self.setting.max_staleness
        self.book.commit(batch.index, batch.groups)
        for group in batch.surplus:
            position = self.book[group].position
            self.book.drop(group, SURPLUS, self.gate.version)
            for replica in self.replicas:
                replica.holds.discard(group)
            again = self.draws.surplus(group)
            self.book.draw(again.group, again.prompt.prompt_id, again.prompt.epoch, position, attempt=again.attempt)
        self.ahead = batch

    def start(self, _: None) -> None:
        assert self.ahead is not None
        self.training, self.ahead = self.ahead, None
        self.gate.started(self.training.index)
        self.book.started(self.training.index)

    def train(self, _: None) -> None:
        batch, self.training = self.training, None
        assert batch is not None
        for group in batch.groups:
            self.draws.ended(group)
        self.book.trained(batch.index)
        self.gate.trained(batch.index)
        v, gate = self.gate.version, self.gate
        last = gate.finished and self.ahead is None
        if v % self.setting.interval == 0 or last:
            self.unpublished.append(v)
        if v % self.setting.save_interval == 0 or last:
            self.waiting = v
            if not self.setting.late_copy and self.writing is None:
                self.save()
                self.copy(None)

    def copy(self, _: None) -> None:
        """The model is that of the cut, copied there and then; the ledger is that of now."""
        cut, self.waiting = self.waiting, None
        assert cut is not None
        writing = self.checkpoints.begin(cut)
        writing.part("model").mkdir()
        (writing.part("model") / "steps").write_text(str(cut))
        writing.close_part("model")
        self.writing = writing, self.ledger.begin_backup(writing.part("ledger") / "ledger.sqlite", 60)

    def complete(self, _: None) -> None:
        assert self.writing is not None
        (writing, copied), self.writing = self.writing, None
        copied.result(60)
        writing.close_part("ledger")
        self.checkpoints.complete(writing, parts=("model", "ledger"), run_id="r", lineage=self.book.lineage)

    # --- its end -----------------------------------------------------------------------------------------------------

    def live(self, events: int | None) -> bool:
        """Plays `events` events, then dies; None: plays fairly to the end. Whether the run is over."""
        try:
            for count in range(events if events is not None else 4000):
                if self.over:
                    break
                self.step(fair=events is None)
                assert self.book.conservation().holds
                assert events is not None or count < 3999, f"does not end: {self.gate.blocked()}"
            return self.over
        finally:
            self.save()
            self.ledger.close()


def play(path: Path, setting: Setting, reader: PromptReader) -> list[int]:
    """Plays a run through all its deaths; returns the cuts at which its lineages began."""
    rng = random.Random(setting.seed)
    cuts = []
    for lineage, events in enumerate((*setting.deaths, None)):
        life = Life(path, setting, lineage, reader, rng)
        cuts.append(life.cut)
        if life.live(events):
            break
    with contextlib.closing(read(path / "ledger.sqlite")) as ledger:
        check(ledger, setting, reader)
    return cuts


def check(ledger, setting: Setting, reader: PromptReader) -> None:  # type: ignore[no-untyped-def]
    found = whereabouts(ledger)
    assert found.holds, found
    assert conservation(ledger).holds
    trained = Counter(trained_prompts(ledger))
    assert not trained or max(trained.values()) == 1, "a prompt is trained once an epoch"
    rows = ledger.execute("SELECT prompt_id, epoch FROM groups WHERE reason IN ('filtered', 'set_aside')")
    dropped = Counter(map(tuple, rows.fetchall()))
    for_good = sum(n for reason, n in found.dropped.items() if reason != SURPLUS)
    size = setting.prompts
    order = [(int(p), epoch) for epoch in range(setting.epochs or 50) for p in reader.order(epoch)]
    full = None if setting.batches is None else setting.batches * setting.batch_size
    if full is None or len(order) - for_good <= full:
        assert setting.epochs is not None
        assert sum(trained.values()) + for_good == size * setting.epochs
        assert set(order) - set(trained) <= set(dropped)
    else:
        assert sum(trained.values()) == full
        if not setting.spare:
            assert Counter(trained) <= Counter(order[: full + for_good])
    if not setting.spare and not setting.drops:
        assert trained == Counter(order[:full]), "as in a run that was not broken"
        if setting.max_staleness == 0:
            assert trained_prompts(ledger) == order[:full], "and in lockstep batch for batch"

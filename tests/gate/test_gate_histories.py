"""Random histories: whatever happens, no sample is too stale, no slot is used twice, and every run ends."""

import dataclasses

import pytest
from gate_histories import BoundError, DeadlockError, Setting, SlotsError, run
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.gate import Batch, Blocked, Gate


@st.composite
def histories(draw: st.DrawFn) -> Setting:
    max_staleness = draw(st.integers(0, 4))
    # Leads near the bound are where groups are old enough to be due.
    lead = max_staleness - min(draw(st.integers(0, max_staleness)), draw(st.integers(0, max_staleness)))
    batches = draw(st.none() | st.integers(1, 12))
    stream = draw(st.integers(1, 60) if batches is None else st.none() | st.integers(1, 60))
    return Setting(
        batch_size=draw(st.integers(1, 4)),
        max_staleness=max_staleness,
        lead=lead,
        interval=draw(st.integers(1, lead + 1)),
        spare=0 if max_staleness else draw(st.sampled_from([0, 0, 1, 3])),
        replicas=draw(st.integers(1, 3)),
        batches=batches,
        stream=stream,
        partial=draw(st.booleans()) and max_staleness > 0,
        first_token=draw(st.booleans()),
        early_start=draw(st.booleans()),
        first_batch=draw(st.sampled_from([0, 0, 7])),
        trouble=draw(st.integers(0, 600)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def check_history(setting: Setting) -> None:
    world = run(setting)
    assert max(world.staleness, default=0) <= setting.max_staleness
    sizes = [size for _, size in sorted(world.sizes.items())]
    assert all(size == setting.batch_size for size in sizes[:-1]), "only the last batch may be short"
    trained = len(world.trained)
    full = None if setting.batches is None else setting.batches * setting.batch_size
    if trained != full:
        assert setting.stream is not None
        assert trained + world.gone == setting.stream, "every group of the stream is trained or dropped for good"
        assert not world.groups


@settings(max_examples=500, deadline=None)
@given(histories())
def test_random_histories_keep_bound_and_slots_and_end(setting: Setting) -> None:
    check_history(setting)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None)
@given(histories())
def test_many_random_histories_keep_bound_and_slots_and_end(setting: Setting) -> None:
    check_history(setting)


# --- wrong rules: each must be found out, or the histories above prove nothing -------------------------------------


class OldestIsSmallestId(Gate):
    """Takes the P ready groups of smallest id, as if ids told the age of tokens."""

    def _choose(self, size: int) -> list[int]:
        return sorted(group for group, record in self._open.items() if record.place.name == "READY")[:size]


class OldestIsSmallestIdAndWaits(OldestIsSmallestId):
    """The same, but honest about the bound: waits when what it would take leaves a due group behind."""

    def can_commit(self) -> bool:
        if not super().can_commit():
            return False
        chosen = set(self._choose(self._next_size()))
        left = [r.deadline for g, r in self._open.items() if g not in chosen and r.deadline is not None]
        return all(sum(d <= w for d in left) <= self._capacity(w, self._next + 1) for w in left)


class CountsTheIntervalIntoP(Gate):
    """Takes a publication of k batches for one batch of k P groups."""

    def _capacity(self, deadline: int, following: int) -> int:
        return 2 * super()._capacity(deadline, following)


class FreesSlotsAtTheStart(Gate):
    """Frees the slots of a batch when its training starts instead of when its version is published."""

    def started(self, batch: int) -> None:
        super().started(batch)
        del self._unpublished[batch]


class CommitsWithoutTheInequality(Gate):
    def _first_unmet_deadline(self) -> int | None:
        return None


class IssuesWithoutTheInequality(Gate):
    def _refuse_move(self, old: int | None, new: int) -> None:
        return None


class TrustsParkedGroups(Gate):
    """Resumes a parked group anywhere, as if an older replica could not sample older tokens."""

    def _deadline_at(self, record, version: int) -> int:
        return record.deadline if record.has_tokens else super()._deadline_at(record, version)

    def sampled(self, group: int, oldest: int) -> None:
        record = self._open.find(group)
        if record.deadline is not None and oldest + self.max_staleness < record.deadline:
            self._open.move(record, oldest + self.max_staleness)
        super().sampled(group, oldest)


class KeepsTheSurplus(Gate):
    """Leaves spare groups open for the next batch."""

    def commit(self) -> Batch | Blocked:
        dropping, self.drop = self.drop, lambda group, again=False: None
        batch = super().commit()
        self.drop = dropping
        return dataclasses.replace(batch, surplus=()) if isinstance(batch, Batch) else batch


class TakesSparesByTheirId(Gate):
    def ready(self, group: int, oldest: int) -> None:
        super().ready(group, oldest)
        self._open.find(group).rank = 0


class SparesWithoutEnd(Gate):
    """Counts the spare groups in no limit, as if any number of them could be outside."""

    def _refuse_move(self, old: int | None, new: int) -> None:
        return None

    @property
    def free_slots(self) -> int:
        return 1


CROWDED = Setting(batch_size=2, max_staleness=2, lead=2, replicas=3, batches=20, trouble=1500)
SPARES = dataclasses.replace(CROWDED, max_staleness=0, lead=0, spare=2)


@pytest.mark.parametrize(
    ("rule", "setting", "failure"),
    [
        (OldestIsSmallestId, CROWDED, BoundError),
        (OldestIsSmallestIdAndWaits, CROWDED, DeadlockError),
        (CountsTheIntervalIntoP, dataclasses.replace(CROWDED, interval=2), (BoundError, DeadlockError)),
        (FreesSlotsAtTheStart, CROWDED, SlotsError),
        (CommitsWithoutTheInequality, CROWDED, BoundError),
        (IssuesWithoutTheInequality, CROWDED, (BoundError, DeadlockError)),
        (TrustsParkedGroups, dataclasses.replace(CROWDED, partial=True), BoundError),
        (KeepsTheSurplus, SPARES, BoundError),
        (SparesWithoutEnd, SPARES, SlotsError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_rule_is_found_out(rule: type[Gate], setting: Setting, failure: type[AssertionError]) -> None:
    with pytest.raises(failure):
        for seed in range(400):
            run(dataclasses.replace(setting, seed=seed), rule, strict=False)


def test_spares_that_are_not_taken_by_their_readiness_are_found_out() -> None:
    with pytest.raises(AssertionError, match="not the most urgent"):
        for seed in range(400):
            run(dataclasses.replace(SPARES, seed=seed), TakesSparesByTheirId)


def test_spares_are_used_and_dropped_in_these_histories() -> None:
    worlds = [run(dataclasses.replace(SPARES, seed=seed)) for seed in range(10)]
    assert all(world.surplus > 0 for world in worlds)

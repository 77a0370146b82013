"""The planner against what can be worked out by hand, against the run's own draws, and against itself."""

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from relax.data import PromptRules, PromptStream, PromptTokenizer, open_source
from relax.data.seeds import sample_seed
from relax.planner.draws import Draws, Lengths
from relax.planner.pipeline import Pipeline, PlanError, UnusableError
from relax.planner.prediction import Prediction, recommend
from relax.planner.setting import Setting
from relax.simulation.lengths import LengthModel

TINY = Path(__file__).resolve().parents[2] / "topologies" / "tiny"

# Two replicas with two slots each: a batch of four fills them once.
SMALL = Setting(
    replicas=("rollout-0", "rollout-1"),
    speeds=(100.0, 100.0),
    slots=2,
    credit=2,
    batch_size=4,
    samples=1,
    max_staleness=0,
    lead=0,
    train_seconds=0.5,
    batches=10,
)
# The shape of the benchmark: 64 slots, heavy tail, trainer as fast as the slots.
HEAVY = Setting(
    replicas=tuple(f"rollout-{i}" for i in range(4)),
    speeds=(1000.0,) * 4,
    slots=16,
    credit=16,
    batch_size=128,
    samples=1,
    max_staleness=0,
    lead=0,
    train_seconds=2.0,
    batches=30,
    partial_rollout=False,
)


def plan(setting: Setting, lengths: str = "constant:100", *, seed: int = 1, prompts: int = 1000, **more) -> Prediction:
    model = LengthModel.parse(lengths)
    drawn = Lengths(model, seed=seed, prompts=prompts, samples=setting.samples, longest=10**6, **more)
    return Pipeline(setting, drawn).predict()


def write_lengths(folder: Path, *lengths: int) -> str:
    path = folder / "lengths.txt"
    path.write_text("".join(f"{n}\n" for n in lengths))
    return f"file:{path}"


# --- by hand -------------------------------------------------------------------------------------------------------


def test_lockstep_takes_generation_and_training_and_publication_one_after_the_other() -> None:
    done = plan(replace(SMALL, publish_seconds=0.25))
    # The last version is waited for by nobody.
    assert done.seconds == pytest.approx(10 * (1.0 + 0.5) + 9 * 0.25)
    assert done.trainer_idle == pytest.approx(1 - 10 * 0.5 / done.seconds)
    assert done.slots_idle == pytest.approx(1 - 10 * 1.0 / done.seconds)
    assert done.staleness == {0: 40} and done.groups == 40 and done.tokens == 4000


def test_a_batch_of_more_samples_than_slots_takes_turns() -> None:
    assert plan(replace(SMALL, batch_size=8)).seconds == pytest.approx(10 * (2.0 + 0.5))
    assert plan(replace(SMALL, samples=4)).seconds == pytest.approx(10 * (4.0 + 0.5))


def test_every_message_on_the_way_of_a_lockstep_batch_takes_a_hop() -> None:
    slow = plan(replace(SMALL, hop_seconds=0.01, score_seconds=0.1, load_seconds=0.2))
    # Order, sampled, score, ready, assemble, train batch; then published, announced, serving before the next batch.
    assert slow.seconds == pytest.approx(10 * (1.5 + 0.1 + 6 * 0.01) + 9 * (0.2 + 3 * 0.01))


@pytest.mark.parametrize("train", [0.25, 1.0, 2.0])
def test_one_batch_of_lead_hides_the_faster_of_generation_and_training(train: float) -> None:
    done = plan(replace(SMALL, max_staleness=1, lead=1, train_seconds=train))
    assert done.seconds == pytest.approx(1.0 + train + 9 * max(1.0, train))


def test_a_faster_replica_gets_more_groups() -> None:
    done = plan(replace(SMALL, speeds=(100.0, 300.0), max_staleness=4, lead=4, train_seconds=0.0, batches=100))
    # 2 slots at 1 and 2 slots at 3 groups a second; a little is lost where the replicas drain.
    assert 0.9 * 8 < done.groups_per_second <= 8


def test_in_lockstep_the_slowest_replica_sets_the_pace() -> None:
    assert plan(replace(SMALL, speeds=(100.0, 300.0))).seconds == pytest.approx(10 * 1.5)


def test_a_publication_that_is_overtaken_is_skipped() -> None:
    """Three batches are trained while one version is published, and a version frees its slots all the same."""
    done = plan(replace(SMALL, max_staleness=8, lead=4, train_seconds=0.1, publish_seconds=4.0, batches=40))
    assert done.batches == 40 and done.max_staleness <= 8


def test_an_interval_publishes_every_second_version() -> None:
    every = plan(replace(SMALL, max_staleness=2, lead=2, batches=21))
    second = plan(replace(SMALL, max_staleness=2, lead=2, batches=21, interval=2))
    assert second.mean_staleness > every.mean_staleness and second.max_staleness <= 2


# --- updates of busy replicas --------------------------------------------------------------------------------------


def test_a_pause_holds_back_every_running_sample() -> None:
    one = replace(SMALL, replicas=("rollout-0",), speeds=(100.0,), slots=1, credit=1, batch_size=1, batches=3)
    setting = replace(one, max_staleness=1, lead=1, partial_rollout=True, load_seconds=0.1)
    # Group 0 ends at 1.1: the replica loaded first, and time counts from the issue at 0.1. Version 1 comes at 1.6,
    # while group 1 runs (1.1 to 2.1): it ends at 2.2, and group 2 with version 2's load at 3.3.
    assert plan(setting).seconds == pytest.approx(3.3 + 0.5 - 0.1)


def test_drained_samples_hold_one_version_and_partial_rollouts_do_not_drain() -> None:
    drain = replace(HEAVY, max_staleness=4, lead=2)
    partial = replace(drain, partial_rollout=True)
    slow, fast = plan(drain, "lognormal:1000,1"), plan(partial, "lognormal:1000,1")
    assert fast.groups_per_second > 1.2 * slow.groups_per_second
    assert max(slow.max_staleness, fast.max_staleness) <= 4


def test_masked_tokens_make_no_sample_older() -> None:
    partial = replace(HEAVY, max_staleness=4, lead=2, partial_rollout=True)
    whole = plan(partial, "lognormal:1000,1")
    masked = plan(replace(partial, mask_offpolicy=True), "lognormal:1000,1")
    assert masked.mean_staleness < whole.mean_staleness


# --- what is dropped -----------------------------------------------------------------------------------------------


def test_a_straggler_is_dropped_and_its_prompt_drawn_again(tmp_path: Path) -> None:
    lengths = write_lengths(tmp_path, *[100] * 19, 5000)
    waiting = plan(SMALL, lengths)
    dropping = plan(replace(SMALL, straggler_timeout=2.0), lengths)
    assert dropping.dropped["straggler"] > 0 and dropping.groups == waiting.groups == 40
    assert dropping.seconds < waiting.seconds / 2
    assert dropping.dropped_tokens == 5000 * dropping.dropped_samples


def test_a_prompt_that_is_always_too_slow_is_set_aside(tmp_path: Path) -> None:
    setting = replace(SMALL, batches=None, straggler_timeout=0.5)
    done = plan(setting, write_lengths(tmp_path, 10, 1000), prompts=60, epochs=1)
    aside = done.dropped["set_aside"]
    assert aside > 0 and done.groups == 60 - aside
    assert done.tokens == 10 * done.groups


def test_a_run_that_would_set_everything_aside_is_told_so() -> None:
    with pytest.raises(UnusableError, match="4 prompts in a row"):
        plan(replace(SMALL, straggler_timeout=0.5))


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_stragglers_are_dropped_at_once_where_the_timeout_is_zero(partial_rollout: bool) -> None:
    """What is freed by one drop may load, report and be given groups before the others are dropped."""
    setting = replace(HEAVY, batch_size=64, batches=40, train_seconds=1.0, max_staleness=2, lead=1)
    done = plan(replace(setting, straggler_timeout=0.0, partial_rollout=partial_rollout), "lognormal:1000,1")
    assert done.dropped["straggler"] > 0 and done.batches == 40
    # Once it is gone the batch goes: its next draw has a place in a later one and is not dropped at its issue.
    assert "set_aside" not in done.dropped


def test_a_group_that_waits_for_its_reward_is_no_straggler() -> None:
    """The run has such groups finish: a new draw would be no sooner."""
    done = plan(replace(SMALL, straggler_timeout=1.5, score_seconds=3.0))
    assert not done.dropped


def test_over_sampling_takes_the_first_and_gives_the_others_back() -> None:
    slots = replace(SMALL, slots=4, credit=4, batches=20)
    spared = plan(replace(slots, over_sampling=6), "lognormal:100,1")
    plain = plan(slots, "lognormal:100,1")
    assert spared.dropped == {"surplus": 2 * 20} and spared.groups == plain.groups == 80
    assert spared.seconds < plain.seconds
    assert spared.tokens < plain.tokens, "it favours short responses"


def test_what_came_back_is_issued_first_under_a_new_number() -> None:
    draws = Draws(total=3)
    first, second = draws.next(), None
    assert first is not None
    draws.issued(first)
    second = draws.next()
    assert second is not None and (second.group, second.place) == (1, 1)
    draws.issued(second)
    draws.give_back([first, second])
    places = []
    while (draw := draws.next()) is not None:
        draws.issued(draw)
        places.append((draw.group, draw.place, draw.attempt))
    assert places == [(2, 0, 0), (3, 1, 0), (4, 2, 0)] and draws.stream_ended


# --- the run's own draws -------------------------------------------------------------------------------------------


def test_prompts_and_lengths_are_those_of_the_run(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcdefghijk"))
    stream = PromptStream(open_source(str(data), seed=5), PromptTokenizer(str(TINY)), PromptRules("prompt"), seed=5)
    try:
        model = LengthModel.parse("lognormal:100,1")
        lengths = Lengths(model, seed=5, prompts=11, samples=3, longest=150)
        for place in range(30):
            while (prompt := stream.take()) is None:
                pass
            assert lengths.prompt(place) == (prompt.epoch, prompt.prompt_id)
            for attempt in (0, 1):
                seeds = [sample_seed(5, prompt.epoch, prompt.prompt_id, i, attempt) for i in range(3)]
                assert lengths.of(place, attempt) == tuple(min(model.draw(seed), 150) for seed in seeds)
    finally:
        stream.close()


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    setting = replace(HEAVY, max_staleness=4, lead=2, partial_rollout=True)
    first, second, other = (plan(setting, "lognormal:1000,1", seed=seed) for seed in (3, 3, 4))
    assert asdict(replace(first, wall_seconds=0)) == asdict(replace(second, wall_seconds=0))
    assert first.seconds != other.seconds


def test_the_stream_ends_a_run_with_a_short_batch() -> None:
    done = plan(replace(SMALL, batches=None, max_staleness=1, lead=1), prompts=5, epochs=2)
    assert done.batches == 3 and done.groups == 10


# --- the whole -----------------------------------------------------------------------------------------------------


def test_more_staleness_is_never_slower_and_never_above_its_bound() -> None:
    partial = replace(HEAVY, partial_rollout=True)
    points = [partial.at(0, 0), partial.at(1, 1), partial.at(4, 2), partial.at(8, 2)]
    plans = [plan(replace(p, partial_rollout=p.max_staleness > 0), "lognormal:1000,1") for p in points]
    for slower, faster in itertools.pairwise(plans):
        assert faster.groups_per_second >= 0.99 * slower.groups_per_second
    assert plans[-1].groups_per_second > 3 * plans[0].groups_per_second
    for done in plans:
        assert done.max_staleness <= done.setting.max_staleness
        assert done.issued == done.groups + sum(done.dropped.values())
        assert done.batch_seconds >= done.ideal_seconds


def test_a_plan_that_breaks_the_bound_is_no_plan() -> None:
    setting = replace(HEAVY, max_staleness=2, lead=2)
    lengths = Lengths(LengthModel.parse("lognormal:1000,1"), seed=1, prompts=100, samples=1, longest=10**6)
    pipeline = Pipeline(setting, lengths)
    pipeline.setting = replace(setting, max_staleness=1)
    with pytest.raises(PlanError, match="staleness 2"):
        pipeline.predict()


def test_a_plan_that_loses_a_group_is_no_plan() -> None:
    lengths = Lengths(LengthModel.parse("constant:100"), seed=1, prompts=100, samples=1, longest=10**6)
    pipeline = Pipeline(SMALL, lengths)
    pipeline.replicas["rollout-1"].slots.speed = 1e-300
    pipeline._events.run = lambda: None  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="stopped after 0 batches"):
        pipeline.predict()


def test_the_least_staleness_that_is_fast_enough_is_recommended() -> None:
    base = plan(SMALL)
    points = [(0, 0, 10.0), (1, 0, 4.05), (1, 1, 4.1), (4, 2, 4.0), (8, 2, 3.95)]
    plans = [replace(base, setting=replace(SMALL, max_staleness=s, lead=at), seconds=t) for s, at, t in points]

    def chosen(within: float) -> tuple[int, int]:
        at = recommend(plans, within).setting
        return at.max_staleness, at.lead

    assert [chosen(within) for within in (0.0, 0.02, 0.03, 0.05, 0.7)] == [(8, 2), (4, 2), (1, 0), (1, 0), (0, 0)]

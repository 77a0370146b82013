"""The pipeline from prompts to exported weights: versions, equality, staleness, metrics."""

import sqlite3

import pyarrow.parquet as pq
import pytest
import tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax.ledger import queries

COLUMNS = {
    "step",
    "version",
    "batch",
    "lineage",
    "time",
    "rollout/raw_reward",
    "rollout/response_len/mean",
    "train/loss",
    "train/pg_clipfrac",
    "train/grad_norm",
    "train/lr",
    "train/staleness/mean",
    "train/staleness/max",
    "perf/tokens_per_s",
    "perf/rollout_wait_s/groups",
    "perf/rollout_wait_s/weights",
    "perf/trainer_wait_s/batch",
    "perf/trainer_wait_s/publication",
}


@pytest.mark.parametrize("name", ["lockstep", "untied", "asynchronous"])
def test_a_run_ends_by_itself_with_one_complete_row_a_batch(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    assert run.code == 0, run.output
    assert run.column("batch") == list(range(len(run.rows)))
    assert run.column("version") == [b + 1 for b in run.column("batch")]
    for row in run.rows:
        assert row.keys() >= COLUMNS
        assert "incomplete" not in row
    assert len(list((run.directory / "samples").glob("*.parquet"))) == len(run.rows)


def test_every_token_of_a_lockstep_batch_is_of_its_version(lockstep: tiny_run.Run) -> None:
    assert lockstep.column("train/staleness/max") == [0.0] * 20
    assert lockstep.column("train/staleness/tokens/max") == [0.0] * 20
    with queries.read(lockstep.directory / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM groups WHERE oldest != batch OR version != batch").fetchone() == (
            0,
        )


@pytest.mark.parametrize("name", ["lockstep", "untied"])
def test_engine_and_trainer_agree_on_log_probs_before_and_after_updates(
    name: str, request: pytest.FixtureRequest
) -> None:
    """From version 0 to the one before the last; both sides scale by the temperature."""
    run = request.getfixturevalue(name)
    assert max(run.column("train/train_rollout_logprob_abs_diff_max")) < 1e-4
    assert min(run.column("train/grad_norm")) > 0, "weights that never change would agree trivially"


def test_staleness_stays_within_its_bound_and_is_used(asynchronous: tiny_run.Run) -> None:
    assert max(asynchronous.column("train/staleness/max")) <= 2
    assert sum(asynchronous.column("train/staleness/mean")) > 0


def test_replicas_draw_different_samples(asynchronous: tiny_run.Run) -> None:
    with queries.read(asynchronous.directory / "ledger.sqlite") as ledger:
        held = dict(ledger.execute("SELECT holder, count(*) FROM groups WHERE state = 'trained' GROUP BY holder"))
    assert set(held) <= {"rollout-0", "rollout-1"}, "on a busy machine one may come too late for a run this short"
    table = pq.read_table(asynchronous.directory / "samples").to_pylist()
    groups: dict[int, set[str]] = {}
    for row in table:
        groups.setdefault(row["group"], set()).add(row["response"])
    assert all(len(responses) > 1 for responses in groups.values()), "samples of a group must differ"
    assert len({frozenset(r) for r in groups.values()}) == len(groups), "groups must differ"


def test_a_sample_is_what_its_seed_draws_among_whatever_others(
    lockstep: tiny_run.Run, asynchronous: tiny_run.Run
) -> None:
    """The first four groups of both runs are of version 0: one replica drew them alone, or two did beside others."""
    drawn = [
        {
            (row["prompt_id"], row["epoch"], row["sample"]): row["response"]
            for row in pq.read_table(run.directory / "samples").to_pylist()
            if row["group"] < 4
        }
        for run in (lockstep, asynchronous)
    ]
    assert len(drawn[0]) == 32 and drawn[0] == drawn[1]
    with queries.read(asynchronous.directory / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT DISTINCT oldest FROM groups WHERE group_id < 4").fetchall() == [(0,)]


@pytest.mark.parametrize("name", ["lockstep", "asynchronous"])
def test_groups_are_conserved(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    with queries.read(run.directory / "ledger.sqlite") as ledger:
        conserved = queries.conservation(ledger)
        assert conserved.holds
        assert conserved.trained == 4 * len(run.rows)
        trained = ledger.execute("SELECT group_id, count(*) FROM groups WHERE state = 'trained' GROUP BY group_id")
        assert all(count == 1 for _, count in trained)


def test_the_export_is_a_hugging_face_model_with_the_last_weights(lockstep: tiny_run.Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(lockstep.directory / "export")
    start = AutoModelForCausalLM.from_pretrained(tiny_run.TINY)
    assert AutoTokenizer.from_pretrained(lockstep.directory / "export")("abc").input_ids
    changed = [n for n, p in model.named_parameters() if not p.float().equal(dict(start.named_parameters())[n].float())]
    assert len(changed) == len(list(model.named_parameters()))


def test_the_ledger_is_plain_sqlite(lockstep: tiny_run.Run) -> None:
    with sqlite3.connect(lockstep.directory / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM groups WHERE state = 'trained'").fetchone() == (80,)

"""Whenever a run dies and however often, what it trains in the end is what it would have trained."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import resume_histories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resume_histories import Setting, play

from relax.data import PromptReader, PromptRules, PromptTokenizer, open_source
from relax.ledger import LedgerError, resume
from relax.ledger.revived import Revived

TINY = Path(__file__).resolve().parents[2] / "topologies" / "tiny"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # SQLite waits for disks too
TOKENIZER = PromptTokenizer(TINY)


@st.composite
def histories(draw: st.DrawFn) -> Setting:
    max_staleness = draw(st.integers(0, 3))
    lead = draw(st.integers(0, max_staleness))
    epochs = draw(st.none() | st.integers(1, 3))
    return Setting(
        prompts=draw(st.integers(1, 9)),
        epochs=epochs,
        batches=draw(st.integers(1, 8) if epochs is None else st.none() | st.integers(1, 8)),
        batch_size=draw(st.integers(1, 4)),
        max_staleness=max_staleness,
        lead=lead,
        interval=draw(st.integers(1, lead + 1)),
        spare=0 if max_staleness else draw(st.sampled_from([0, 0, 2])),
        save_interval=draw(st.integers(1, 4)),
        replicas=draw(st.integers(1, 3)),
        drops=draw(st.booleans()),
        late_copy=draw(st.booleans()),
        deaths=tuple(draw(st.lists(st.integers(0, 120), max_size=4))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def check_history(setting: Setting) -> list[int]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(setting.prompts)))
        source = open_source(str(prompts), seed=0)
        return play(Path(folder), setting, PromptReader(source, TOKENIZER, PromptRules("prompt"), seed=setting.seed))


@pytest.fixture(autouse=True)
def the_machine_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, not disks."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories())
def test_a_run_that_dies_and_is_resumed_trains_what_it_would_have(setting: Setting) -> None:
    check_history(setting)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories())
def test_many_runs_that_die_and_are_resumed_train_what_they_would_have(setting: Setting) -> None:
    check_history(setting)


def cuts_of(**chosen: object) -> list[list[int]]:
    """The cuts at which the lineages of some runs began."""
    return [check_history(dataclasses.replace(LONG, seed=seed, **chosen)) for seed in range(8)]  # type: ignore[arg-type]


LONG = Setting(prompts=7, epochs=5, batch_size=2, max_staleness=2, lead=2, save_interval=2, deaths=(60, 60, 60))


@pytest.mark.parametrize("late_copy", [False, True])
def test_two_resumes_in_a_row_each_go_on_from_a_later_checkpoint(late_copy: bool) -> None:
    cuts = cuts_of(late_copy=late_copy)
    assert all(one == sorted(one) for one in cuts)
    assert sum(len(set(one)) >= 3 for one in cuts) >= 3, cuts


def test_a_resume_that_dies_before_its_first_checkpoint_begins_where_it_began() -> None:
    cuts = cuts_of(deaths=(80, 0, 5, 60))
    assert all(one[1] == one[2] == one[3] for one in cuts if len(one) > 3)
    assert any(one[1] > 0 for one in cuts), cuts


def test_a_run_that_dies_before_its_first_checkpoint_begins_anew() -> None:
    assert cuts_of(deaths=(10, 10)) == [[0, 0, 0]] * 8


def test_in_lockstep_every_batch_is_what_it_was() -> None:
    cuts = cuts_of(max_staleness=0, lead=0, drops=False)
    assert any(one[-1] > 0 for one in cuts), cuts


# --- wrong rules: each must be found out, or the histories above prove nothing ---------------------------------------


def only_open_groups(rule: str) -> str:
    return rule.replace("OR (batch >= ?", "OR (batch > 10000 + ?")


def the_batch_of_the_cut_is_left_out(rule: str) -> str:
    return rule.replace("batch >= ?", "batch > ?")


def also_before_the_cut(rule: str) -> str:
    return rule.replace("batch >= ?", "batch >= -1 + ?")


def surplus_too(rule: str) -> str:
    return rule.replace("!= 'surplus'", "!= 'nothing'")


@pytest.mark.parametrize(
    "mutate", [only_open_groups, the_batch_of_the_cut_is_left_out, also_before_the_cut, surplus_too]
)
def test_a_wrong_rule_of_what_is_revived_is_found_out(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[str], str]
) -> None:
    rule = mutate(resume._REVIVED)
    assert rule != resume._REVIVED
    monkeypatch.setattr(resume, "_REVIVED", rule)
    spare = {"max_staleness": 0, "lead": 0, "spare": 2} if mutate is surplus_too else {}
    with pytest.raises((AssertionError, LedgerError)):
        cuts_of(late_copy=True, **spare)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_stream_that_goes_on_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    whole = resume.resume

    def elsewhere(path: Path, cut: int) -> Revived:
        revived = whole(path, cut)
        return dataclasses.replace(revived, index=revived.index + (off if revived.index + off in range(8) else 0))

    monkeypatch.setattr(resume_histories, "resume", elsewhere)
    with pytest.raises((AssertionError, LedgerError)):
        cuts_of()

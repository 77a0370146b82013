"""Runs that are killed as a whole and go on: what is trained in the end is what the unbroken run trains."""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from killing import Life, trained_prompts

from relax.checkpoints import CheckpointDirectory
from relax.ledger import queries
from relax.metrics.history import read_rows

BATCH = 8
SIMULATED: dict[str, Any] = tiny_run.SIMULATED | {
    "services": {"rollout": {"engine": "simulated", "replicas": 2}, "actor": {"engine": "simulated"}},
    "max_staleness": 2,
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": 200,
    "sim_length": "pareto:20,1.5",
    "sim_tokens_per_second": "1000,500",
    "sim_slots": 8,
    "sim_train_seconds": 0.08,
    "sim_publish_seconds": 0.02,
    "save_interval": 5,
}


def begin(folder: Path, **options: Any) -> Life:
    tiny_run.write_topology(folder, **(SIMULATED | options))
    return Life(folder)


def again(folder: Path, *flags: str) -> Life:
    return Life(folder, "--resume", *flags)


def rows(life: Life) -> list[dict[str, Any]]:
    return read_rows(life.directory / "metrics.jsonl")


# --- moments ---------------------------------------------------------------------------------------------------------
# Each is reached once the run has trained `more` batches in this life.

Moment = Callable[[], bool]


def trained(life: Life, more: int) -> Moment:
    goal = life.trained() + more
    return lambda: life.trained() >= goal


def checkpoint_under_way(life: Life, more: int) -> Moment:
    """A directory is there that does not count yet."""
    enough = trained(life, more)
    return lambda: enough() and any(life.directory.glob("checkpoints/*.partial-*"))


def newest(life: Life) -> int:
    """The batch of the newest complete checkpoint."""
    made = next(CheckpointDirectory(life.directory / "checkpoints").marked(), None)
    return 0 if made is None else made.batch


def just_published(life: Life, more: int) -> Moment:
    enough, known = trained(life, more), [0]

    def moment() -> bool:
        manifests = len([*life.directory.glob("weights/*.json")])
        before, known[0] = known[0], manifests
        return enough() and manifests > before

    return moment


def epoch_ends(life: Life, more: int) -> Moment:
    """The last batch of which there is a row holds prompts of two epochs."""
    enough = trained(life, more)

    def moment() -> bool:
        last = rows(life)[-1]["batch"]
        return enough() and last * BATCH // PROMPTS < ((last + 1) * BATCH - 1) // PROMPTS

    return moment


PROMPTS, EPOCHS = 60, 4  # 30 batches; no batch but the last ends where an epoch ends


@pytest.fixture
def data(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What comes after {n}?"}) + "\n" for n in range(PROMPTS)))
    return str(file)


def every_prompt_in_every_epoch(epochs: int) -> Counter[tuple[int, int]]:
    return Counter((prompt, epoch) for epoch in range(epochs) for prompt in range(PROMPTS))


def cuts(directory: Path) -> list[int]:
    """Where the lineages that the newest one consists of began, the oldest first."""
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        return [cut for (cut,) in ledger.execute("SELECT first_batch FROM lineages ORDER BY lineage")]


def check(life: Life, lineage: int, epochs: int = EPOCHS) -> None:
    assert life.lineage() == lineage
    assert trained_prompts(life.directory) == every_prompt_in_every_epoch(epochs)
    last = rows(life)
    assert [row["batch"] for row in last] == list(range(PROMPTS * epochs // BATCH))
    assert max(row["train/staleness/max"] for row in last) <= 2
    newest = CheckpointDirectory(life.directory / "checkpoints").newest()
    assert newest is not None and newest.batch == len(last) and newest.lineage == lineage


def test_four_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, data: str) -> None:
    """Before there is any checkpoint, right after a publication, inside a checkpoint, and where an epoch ends (in
    batches 7, 15 and 22)."""
    life = begin(tmp_path, prompt_data=data, num_rollout=None, num_epoch=EPOCHS, save_interval=3)
    kills: list[tuple[Callable[[Life, int], Moment], int]] = [
        (trained, 2),
        (just_published, 1),
        (checkpoint_under_way, 1),
        (epoch_ends, 1),
    ]
    for lineage, (moment, more) in enumerate(kills):
        assert life.lineage_is(lineage), life.output
        if lineage:  # the next life begins at a checkpoint of this one
            known = newest(life)
            assert life.until(lambda life=life, known=known: newest(life) > known), life.output  # type: ignore[misc]
        assert life.until(moment(life, more)), life.output
        life.kill()
        life = again(tmp_path)
    assert life.end() == 0, life.output
    check(life, len(kills))
    began = cuts(life.directory)
    assert began[0] == 0 and len(began) == len(kills) and began == sorted(set(began)), began


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_moments_of_sixty_batches(tmp_path: Path, data: str) -> None:
    epochs = 2 * EPOCHS
    options = {"num_rollout": None, "num_epoch": epochs, "save_interval": 2, "sim_train_seconds": 0.2}
    life = begin(tmp_path, prompt_data=data, **options)
    chosen, kills = random.Random(5), 0
    moments = [trained, trained, checkpoint_under_way, just_published]
    while kills < 20:
        moment = epoch_ends if kills in (6, 13) else chosen.choice(moments)
        assert life.lineage_is(kills), life.output
        if not life.until(moment(life, chosen.randrange(4))):
            pytest.fail(f"the run ended after {kills} kills: {life.output}")
        time.sleep(chosen.random() * 0.1)
        life.kill()
        kills += 1
        life = again(tmp_path)
    assert life.end() == 0, life.output
    check(life, kills, epochs)


def test_a_truncated_checkpoint_is_skipped_and_the_one_before_is_used(tmp_path: Path, data: str) -> None:
    life = begin(tmp_path, prompt_data=data, num_rollout=None, num_epoch=EPOCHS, save_interval=3)
    assert life.until(lambda: (life.directory / "checkpoints" / "6" / "complete.json").is_file()), life.output
    life.kill()
    marked = sorted(int(path.parent.name) for path in life.directory.glob("checkpoints/*/complete.json"))
    damaged = life.directory / "checkpoints" / str(marked[-1]) / "ledger" / "ledger.sqlite"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    life = again(tmp_path)
    assert life.end() == 0, life.output
    assert "checkpoint_skipped" in life.output and "were written" in life.output
    assert f"goes on at batch {marked[-2]}, from" in life.output
    check(life, 1)
    assert cuts(life.directory) == [0, marked[-2]]


@pytest.mark.long
def test_a_run_that_died_after_its_last_batch_ends_when_it_is_resumed(tmp_path: Path, data: str) -> None:
    life = begin(tmp_path, prompt_data=data, num_rollout=4, save_interval=None)
    assert life.until(lambda: (life.directory / "checkpoints" / "4" / "complete.json").is_file()), life.output
    life.kill()
    life = again(tmp_path)
    assert life.end() == 0, life.output
    assert "goes on at batch 4, from" in life.output and life.trained() == 4
    (life.directory / "export").mkdir()
    life = again(tmp_path)
    assert life.end() == 2 and "the run is finished: batch 3 is trained and saved" in life.output
    life = again(tmp_path, "--num-rollout", "6")
    assert life.end() == 0, life.output
    assert sum(trained_prompts(life.directory).values()) == 6 * BATCH


def test_what_cannot_be_resumed_is_refused(tmp_path: Path, data: str) -> None:
    life = begin(tmp_path, prompt_data=data, num_rollout=2, save_interval=None)
    assert life.end() == 0, life.output
    life = again(tmp_path, "--seed", "8", "--num-rollout", "1")
    assert life.end() == 2
    assert "--seed = 8" in life.output and "the run that is resumed has 7" in life.output
    assert "--num-rollout = 1" in life.output and "has 2" in life.output
    life = Life(tmp_path, "--resume", str(tmp_path / "other"))
    assert life.end() == 2 and "--resume" in life.output and "is another directory than --run-dir" in life.output
    assert not (tmp_path / "other").exists()
    (life.directory / "runtime.json").unlink()
    life = again(tmp_path)
    assert life.end() == 2 and "is no run directory" in life.output


@pytest.mark.parametrize("victim", ["actor", pytest.param("controller", marks=pytest.mark.long)])
def test_with_restart_a_run_resumes_by_itself(tmp_path: Path, data: str, victim: str) -> None:
    tiny_run.write_topology(tmp_path, **SIMULATED | {"prompt_data": data, "num_rollout": None, "num_epoch": EPOCHS})
    life = Life(tmp_path, "--restart")
    assert life.until(lambda: life.trained() >= 7 and newest(life)), life.output
    life.kill_service(victim)
    assert life.end() == 0, life.output
    assert f"{victim} was killed by SIGKILL; the run is resumed" in life.output
    cut = re.search(r"goes on at batch (\d+), from", life.output)
    assert cut and int(cut[1]) in range(5, PROMPTS * EPOCHS // BATCH, 5), life.output
    check(life, 1)

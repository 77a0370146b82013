"""Real processes around a simulated engine, killed one after the other, over a transport that loses, doubles and
delays: the run finishes, and ledger, services and the actor's log agree on what became of every group."""

import random
import time
from pathlib import Path

import pytest
from chaos import Setting, chaos, tiny_run

SIMULATED = Setting(
    options=tiny_run.SIMULATED
    | {
        "max_staleness": 2,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 1,
        "rollout_max_response_len": 500,
        "sim_length": "pareto:20,1.5",
        "sim_tokens_per_second": "1000,700,500",
        "sim_slots": 8,
        "sim_train_seconds": 1.0,
        "sim_publish_seconds": 0.02,
        "peer_timeout": 8.0,
        "restart_budget": "99/600",
    },
    rollouts=3,
    rewards=2,
    engine="simulated",
)


def test_replicas_die_one_after_the_other_and_the_run_goes_on(tmp_path: Path) -> None:
    with chaos(tmp_path, SIMULATED, batches=40, seed=1) as it:
        it.wait_for_batches(2)
        it.kill_and_see_it_again("rollout-0")
        it.kill_and_see_it_again("reward-1")
        it.kill_and_see_it_again("advantages")
        it.look()
        it.stop_for_too_long("rollout-1")
        it.look()
        it.finish(patience=200)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [1, 2])
def test_thirty_deaths_in_two_hundred_batches(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    victims = [name for name in SIMULATED.services if name not in ("controller", "actor")]
    with chaos(tmp_path, SIMULATED, batches=200, seed=seed) as it:
        it.wait_for_batches(2)
        while it.kills < 30:
            before = it.trained()
            if it.kills == 15:
                it.stop_for_too_long(dice.choice(victims))
            else:
                it.strike(dice.choice(victims))
            if it.kills % 10 == 0:
                it.wait_for_batches(before + 2)
                it.look()
            time.sleep(dice.uniform(1.0, 4.0))
        it.finish(patience=600)


REAL = Setting(
    options={
        "max_staleness": 2,
        "rollout_batch_size": 4,
        "rollout_max_response_len": 48,
        "use_tis": True,
        "rollout_max_num_seqs": 32,
        "restart_budget": "99/600",
    }
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_five_deaths_of_the_only_engine_in_forty_batches(tmp_path: Path) -> None:
    """vLLM and Megatron: while rollout is away there is nobody to sample."""
    with chaos(tmp_path, REAL, batches=40, seed=3) as it:
        for batch in (3, 9, 15, 21, 27):
            it.wait_for_batches(batch)
            it.kill_and_see_it_again("rollout-0")
        it.look()
        it.finish(patience=900)

"""A long run of real processes around a simulated engine: no service holds more at its end than at its middle."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "end_to_end"))

import tiny_run
from inventory import Book

GROUPS, BATCH = 20_000, 50
OPTIONS: dict[str, Any] = tiny_run.SIMULATED | {
    "services": {
        "rollout": {"engine": "simulated", "replicas": 2},
        "reward": {"replicas": 1},
        "actor": {"engine": "simulated"},
    },
    "max_staleness": 2,
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 400,
    "sim_length": "pareto:20,1.5",
    "sim_tokens_per_second": "2000,1500",
    "sim_slots": 32,
    "sim_train_seconds": 0.4,
    "sim_publish_seconds": 0.02,
    "partial_rollout": True,
    "save_interval": 50,
}
FLAT = 1.05  # largest to smallest resident memory


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_memory_is_flat_over_twenty_thousand_groups(tmp_path: Path) -> None:
    topology, directory = tiny_run.write_topology(tmp_path, num_rollout=GROUPS // BATCH, **OPTIONS), tmp_path / "run"
    command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", topology, "--run-dir", directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2300, cwd=tmp_path)
    run = tiny_run.Run(directory, done.returncode, done.stdout + done.stderr)
    assert run.code == 0, run.output
    book = Book.read(directory / "ledger.sqlite")
    assert book.balance.holds and book.balance.trained == GROUPS
    services = [name for name in run.rows[-1] if name.startswith("memory/")]
    assert len(services) == 6, services
    grown = {}
    for name in services:
        second_half = [value for value in run.column(name)[len(run.rows) // 2 :] if value is not None]
        assert len(second_half) > 100, name
        grown[name] = max(second_half) / min(second_half)
    print({name: round(ratio, 4) for name, ratio in grown.items()})
    assert {name: ratio for name, ratio in grown.items() if ratio > FLAT} == {}

"""A run across two hosts, with keys: it works end to end, and who has no key gets nothing out of it."""

import json
import time
from pathlib import Path
from typing import Any

import tiny_run
from launched import PATIENCE, Launched, secret
from namespaces import Host

from relax.metrics.history import read_rows

BATCHES = 4
LEFT = ("controller", "advantages", "actor")
OPTIONS: dict[str, Any] = {
    "rm_type": None,
    "custom_rm_path": "relax.simulation.reward:coin",
    "lr": None,
    "n_samples_per_prompt": 1,
    "num_rollout": BATCHES,
    "rollout_max_response_len": 50,
    "sim_length": "constant:20",
    "sim_tokens_per_second": "500",
    "sim_slots": 4,
    "sim_train_seconds": 0.05,
    "sim_publish_seconds": 0.02,
    "startup_timeout": 150,
}


def topology(folder: Path, left: Host, right: Host) -> Path:
    services = {role: {"node": "left"} for role in LEFT} | {role: {"node": "right"} for role in ("rollout", "reward")}
    services["rollout"] |= {"engine": "simulated", "replicas": 2}
    services["actor"] |= {"engine": "simulated"}
    top = {
        "controller": f"tcp://{left.address}:5755",
        "nodes": {host.name: {"address": host.address} for host in (left, right)},
    }
    return tiny_run.write_topology(folder, services=services, top=top, **OPTIONS)


def wait_for(condition, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.1)


def test_a_run_across_two_hosts_works_with_keys_and_discloses_nothing_without(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    left, right = hosts
    file, keys, foreign = topology(tmp_path, left, right), secret(tmp_path / "keys"), secret(tmp_path / "foreign")
    trainer = Launched(left, file, tmp_path, "trainer", "--keys", keys)
    wait_for(lambda: trainer.events("actor", "service_ready"), "the actor, which is ready once the controller is")

    brief = ("--startup-timeout", "5")
    intruders = {
        "foreign key": Launched(right, file, tmp_path, "foreign-run", "--keys", foreign, *brief),
        "plain text": Launched(right, file, tmp_path, "plain-run", "--insecure", *brief),
        "no key": Launched(right, file, tmp_path, "bare-run", *brief),
    }
    told = {name: intruder.end() for name, intruder in intruders.items()}
    assert told["no key"][0] == 2 and "Make keys with" in told["no key"][1], told
    assert told["foreign key"][0] == 1 and "the connection was closed" in told["foreign key"][1], told
    # Which of the two it is depends on who hangs up first.
    reasons = ("one side speaks plain text", "the connection was closed")
    assert told["plain text"][0] == 1 and any(reason in told["plain text"][1] for reason in reasons), told
    run_id = json.loads((trainer.directory / "runtime.json").read_text())["run_id"]
    assert not any(run_id in text for _, text in told.values()), told
    refused = trainer.events("controller", "connection_refused")
    assert {r["peer"] for r in refused} == {right.address}
    reasons = " ".join(r["reason"] for r in refused)
    assert "different keys" in reasons and "plain text" in reasons
    assert {r["member"] for r in trainer.events("controller", "member_joined")} <= set(LEFT)

    engines = Launched(right, file, tmp_path, "engines", "--keys", keys)
    assert engines.end()[0] == 0, engines.output.read_text()
    assert trainer.end()[0] == 0, trainer.output.read_text()
    rows = read_rows(trainer.directory / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, BATCHES + 1))
    joined = {r["member"]: r["node"] for r in trainer.events("controller", "member_joined")}
    assert joined["rollout-1"] == joined["reward-0"] == "right" and joined["actor"] == "left"

"""A service takes its cores, threads and devices itself, started by the launcher or by hand."""

import json
import os
import subprocess
import sys

from relax.config.topology import Service

SETTLE = """
import json, os, sys
from relax.config.topology import Service
from relax.services.cli import settle

settle(Service("reward-0", "reward", 0, None, **json.loads(sys.argv[1])))
print(json.dumps([sorted(os.sched_getaffinity(0)), dict(os.environ)]))
"""


def settled(**entry: object) -> tuple[list[int], dict[str, str]]:
    command = [sys.executable, "-c", SETTLE, json.dumps(entry)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    cores, environment = json.loads(done.stdout)
    return cores, environment


def test_a_service_takes_what_its_entry_gives_it() -> None:
    core = min(os.sched_getaffinity(0))
    cores, environment = settled(cores=[core], threads=2, devices=[5, 6])
    assert cores == [core]
    assert environment["OMP_NUM_THREADS"] == "2" and environment["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_an_entry_that_names_nothing_leaves_cores_and_devices_alone() -> None:
    assert Service("reward-0", "reward", 0, None).threads == 1
    cores, environment = settled()
    assert set(cores) == os.sched_getaffinity(0)
    assert environment.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")

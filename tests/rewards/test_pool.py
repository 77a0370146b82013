import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax.rewards import Item, RewardPool, RewardPoolError, Score, VerifierSpec

TOLD = VerifierSpec("custom", path="tests.rewards.functions:told")


def item(response: str, sample: str = "group 3 sample 1", label: object = None, **row: object) -> Item:
    return Item(sample, "7", response, label, dict(row))


def run(*responses: str | Item, spec: VerifierSpec = TOLD, **settings) -> list[Score]:
    async def scored() -> list[Score]:
        pool = RewardPool(spec, **settings)
        await pool.start()
        try:
            return await pool.score([r if isinstance(r, Item) else item(r) for r in responses])
        finally:
            await pool.close()

    return asyncio.run(scored())


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_scores_keep_the_order_of_their_items() -> None:
    scores = run(
        *("x" * n for n in range(30)), spec=VerifierSpec("custom", path="tests.rewards.functions:length"), workers=2
    )
    assert [score.value for score in scores] == list(range(30))


def test_function_sees_prompt_response_label_and_row() -> None:
    (score,) = run(item("echo", label=5, digit=3, big=10**40, lone="\ud800"))
    assert score.value == 753


@pytest.mark.parametrize(("response", "value"), [("numpy", 0.5), ("bool", 1.0), ("print", 1.0), ("other", 0.25)])
def test_real_numbers_of_any_type_are_values(response: str, value: float) -> None:
    (score,) = run(response)
    assert score == Score(value) and isinstance(score.value, float)


def test_abstaining_is_neither_zero_nor_a_failure() -> None:
    (score,) = run("abstain")
    assert score.abstained and score.value is None and score.failure is None


@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        ("raise", "exception", "KeyError: 'no such thing'"),
        ("exit", "exception", "SystemExit"),
        ("nan", "bad_value", "returned nan (float), which is not finite"),
        ("inf", "bad_value", "returned -inf (float), which is not finite"),
        ("huge 400", "bad_value", "0000 (int), which is beyond the range of a float"),
        ("huge 5000", "bad_value", "returned a value that cannot be shown (int), which is beyond the range of a float"),
        ("huge-fraction", "bad_value", "(Fraction), which is beyond the range of a float"),
        ("list", "bad_value", r"returned \[1.0\] (list), not a number"),
        ("text", "bad_value", "returned '1.0' (str), not a number"),
        ("die 3", "died", "exit code 3"),
    ],
)
def test_failure_names_function_and_sample_and_is_no_number(response: str, kind: str, says: str) -> None:
    failed, after = run(response, "fine")
    assert failed.value is None and not failed.abstained and failed.failure is not None
    assert failed.failure.kind == kind and says.replace("\\", "") in failed.failure.detail
    assert "tests.rewards.functions:told" in str(failed.failure) and "group 3 sample 1" in str(failed.failure)
    assert after.value == 0.25  # the pool goes on


def test_traceback_begins_in_the_function_of_the_user() -> None:
    (score,) = run("raise")
    assert score.failure is not None
    assert "functions.py" in score.failure.detail and "worker.py" not in score.failure.detail


def test_hanging_sample_costs_its_time_limit_and_its_worker_alone() -> None:
    async def scored() -> tuple[list[Score], dict[str, int]]:
        pool = RewardPool(TOLD, timeout=0.3)
        await pool.start()
        scores = await pool.score([item("pid"), item("hang", sample="group 9 sample 0"), item("pid")])
        counters = dict(pool.counters)
        await pool.close()
        return scores, counters

    (before, hung, after), counters = asyncio.run(scored())
    assert hung.failure is not None and hung.failure.kind == "timeout"
    assert "group 9 sample 0" in str(hung.failure) and "--rm-timeout 0.3 s" in str(hung.failure)
    assert before.value != after.value and wait_gone(int(before.value or 0))
    assert counters == {"scored": 2, "failed_timeout": 1, "restarts": 1}


def test_what_a_hanging_function_started_is_killed_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (score,) = run(f"hang-with-child {pid_file}", timeout=1.0)
    assert score.failure is not None and score.failure.kind == "timeout"
    assert wait_gone(int(pid_file.read_text()))


def test_sample_whose_worker_was_killed_from_outside_is_scored_again(tmp_path: Path) -> None:
    (score,) = run(f"die-once {tmp_path / 'mark'}")
    assert score.value == 1.0


def test_unusable_function_ends_the_start_and_leaves_no_process() -> None:
    async def start() -> None:
        pool = RewardPool(VerifierSpec("custom", path="tests.rewards.functions:missing"), workers=2)
        await pool.start()

    with pytest.raises(RewardPoolError, match=r"functions:missing cannot be loaded(.|\n)*has no function"):
        asyncio.run(start())
    assert not children()


def children() -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in out.splitlines() if "relax.rewards.worker" in line]


def test_closed_pool_answers_everyone_who_waits() -> None:
    async def close_under_load() -> None:
        pool = RewardPool(TOLD, timeout=60, backlog=2)
        await pool.start()
        waiting = [asyncio.create_task(pool.score([item("hang")] * 3)) for _ in range(3)]
        await asyncio.sleep(0.2)
        await pool.close()
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert all(isinstance(result, RewardPoolError) for result in results)
        with pytest.raises(RewardPoolError, match="closed"):
            await asyncio.wait_for(pool.score([item("x")]), 5)

    asyncio.run(close_under_load())
    assert not children()


def test_cancelled_caller_does_not_hold_the_pool() -> None:
    async def cancel() -> Score:
        pool = RewardPool(TOLD, timeout=0.5)
        await pool.start()
        task = asyncio.create_task(pool.score([item("hang")] * 50))
        await asyncio.sleep(0.1)
        task.cancel()
        (score,) = await asyncio.wait_for(pool.score([item("fine")]), 10)
        await pool.close()
        return score

    assert asyncio.run(cancel()).value == 0.25


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    code = """
import asyncio, os
from relax.rewards import Item, RewardPool, VerifierSpec
async def main():
    pool = RewardPool(VerifierSpec("custom", path="tests.rewards.functions:told"), timeout=600)
    await pool.start()
    (score,) = await pool.score([Item("s", "", "pid", None, {})])
    print(int(score.value), flush=True)
    await pool.score([Item("s", "", "hang", None, {})])
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert wait_gone(pid)


def test_works_under_uvloop() -> None:
    import uvloop

    async def scored() -> list[Score]:
        pool = RewardPool(TOLD, timeout=0.3)
        await pool.start()
        scores = await pool.score([item("hang"), item("die 4"), item("fine")])
        await pool.close()
        return scores

    hung, died, fine = uvloop.run(scored())
    assert hung.failure is not None and hung.failure.kind == "timeout"
    assert died.failure is not None and "exit code 4" in died.failure.detail
    assert fine.value == 0.25

"""The engine's process: its death is known at once, and it never outlives its parent."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import models
import psutil
import pytest
from conftest import Rig, prompt, request

from relax.engines.base import EngineDied, EngineError
from relax.engines.vllm import VllmEngine


def test_third_architecture_serves_its_weights(doomed: Rig) -> None:
    doomed.load(doomed.publish(1))
    assert doomed.error(doomed.generate(request("q", temperature=0.7))[0], prompt(), 0.7) < 1e-4


def test_death_is_told_to_the_waiting_and_to_whoever_comes_later(doomed: Rig) -> None:
    async def scenario() -> None:
        futures = await doomed.engine.submit([request(f"w{i}", max_tokens=236) for i in range(3)])
        (pid,) = doomed.engine.info.pids
        os.kill(pid, signal.SIGKILL)
        reason = await asyncio.wait_for(doomed.engine.died, 20)
        assert str(pid) in reason
        assert "SIGKILL" in reason
        for answer in await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 20):
            assert isinstance(answer, EngineDied)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await doomed.engine.generate(request("late"))
        with pytest.raises(EngineDied, match="SIGKILL"):
            await doomed.engine.load(doomed.store.newest(), doomed.store.directory, deadline=60)
        assert doomed.engine.running == 0

    doomed.run(scenario())
    doomed.run(doomed.engine.shutdown())
    doomed.run(doomed.engine.shutdown())


ORPHAN = """
import asyncio, sys, time
from relax.engines.vllm import VllmEngine
async def main():
    engine = VllmEngine(sys.argv[1], max_model_len=64)
    await engine.start()
    print(*engine.info.pids, flush=True)
    time.sleep(600)
if __name__ == "__main__":
    asyncio.run(main())
"""


def test_engine_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    models.make_model(tmp_path / "model")
    script = tmp_path / "parent.py"
    script.write_text(ORPHAN)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    for _ in range(100):
        if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"engine process {child.pid} is still running 10 s after its parent was killed")


def test_checkpoint_that_cannot_be_served_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        VllmEngine(tmp_path, max_model_len=64)
    models.make_model(tmp_path)
    with pytest.raises(EngineError, match=r"at most 512 tokens, asked are 513.*--rollout-max"):
        VllmEngine(tmp_path, max_model_len=513)
    (tmp_path / "generation_config.json").unlink()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 1', '"eos_token_id": null'))
    with pytest.raises(EngineError, match="which token ends a response"):
        VllmEngine(tmp_path, max_model_len=64)


def test_head_size_without_a_kernel_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    models.make_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 32', '"head_dim": 16'))
    engine = VllmEngine(tmp_path, max_model_len=64)
    before = multiprocessing.active_children()

    async def start() -> None:
        await engine.start()

    with pytest.raises(EngineError, match=r"attention heads of 16.*32, 64, 80"):
        asyncio.run(start())
    assert multiprocessing.active_children() == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "kv_cache_mb", "message"),
    [("UnheardOfForCausalLM", 64, "UnheardOfForCausalLM"), ("Qwen3ForCausalLM", 10**7, "this service's output")],
)
def test_start_that_fails_says_where_the_cause_is(tmp_path: Path, architecture, kv_cache_mb, message) -> None:
    models.make_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", architecture))

    async def start() -> None:
        engine = VllmEngine(tmp_path, max_model_len=64, kv_cache_mb=kv_cache_mb)
        try:
            await engine.start()
        finally:
            await engine.shutdown()

    with pytest.raises(EngineError, match=rf"(?s)did not start.*{message}"):
        asyncio.run(start())


@pytest.mark.long
def test_shutdown_during_the_start_leaves_no_process(tmp_path: Path) -> None:
    models.make_model(tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def added() -> list[psutil.Process]:
        return [
            c
            for c in psutil.Process().children(recursive=True)
            if c.pid not in before and "spawn_main" in str(c.cmdline())
        ]

    async def scenario() -> None:
        engine = VllmEngine(tmp_path, max_model_len=64)
        starting = asyncio.create_task(engine.start())
        while not added():  # noqa: ASYNC110 - nobody tells when a child appears
            await asyncio.sleep(0.05)
        starting.cancel()
        await engine.shutdown()

    asyncio.run(scenario())
    psutil.wait_procs(added(), timeout=10)
    assert added() == []


def test_engine_that_was_never_started_says_so(tmp_path: Path) -> None:
    models.make_model(tmp_path)
    engine = VllmEngine(tmp_path, max_model_len=64)
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(engine.generate(request("r")))
    asyncio.run(engine.shutdown())

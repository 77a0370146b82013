"""Records five rollout batches of topologies/tiny, sampled by vLLM and scored by reasoning-gym, for tests that want
real data without an engine. Run it to record them anew:

    .venv/bin/python tests/recorded/make.py
"""

import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np

from relax.data import PromptTokenizer, open_source, tokenize
from relax.engines.base import Request
from relax.engines.vllm import VllmEngine
from relax.protocol.tensors import Responses
from relax.rewards import VerifierSpec
from relax.rewards.verifiers import build
from relax.weights.checkpoint import checkpoint_tensors
from relax.weights.store import ChunkStore

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[1] / "topologies" / "tiny"
BATCHES, GROUPS, SAMPLES, MAX_TOKENS, TEMPERATURE = 5, 4, 8, 16, 0.7


async def record() -> None:
    engine, tokenizer = VllmEngine(TINY, max_model_len=256), PromptTokenizer(TINY)
    source, verifier = open_source("reasoning_gym:spell_backward", seed=1), build(VerifierSpec("reasoning_gym"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = ChunkStore(folder, create=True)
        manifest = store.publish(checkpoint_tensors(TINY), run_id="recorded", lineage=0, version=0, step=0)
        await engine.start()
        await engine.load(manifest, store.directory, deadline=60)
        for batch in range(BATCHES):
            rows = [source.row(batch * GROUPS + g) for g in range(GROUPS)]
            prompts = [tokenize(tokenizer, row, input_key="prompt", apply_chat_template=False) for row in rows]
            requests = [
                Request(f"{g}.{i}", prompt.token_ids, MAX_TOKENS, TEMPERATURE, seed=1000 * batch + 10 * g + i)
                for g, prompt in enumerate(prompts)
                for i in range(SAMPLES)
            ]
            results = await asyncio.gather(*await engine.submit(requests, together=True))
            answers = [tokenizer.decode(result.token_ids) for result in results]
            owners = [(rows[n // SAMPLES], prompts[n // SAMPLES]) for n in range(len(results))]
            rewards = [verifier(p.text, a, None, row) for (row, p), a in zip(owners, answers, strict=True)]
            responses = Responses.of([p.token_ids for _, p in owners], [r.token_ids for r in results])
            np.savez_compressed(
                HERE / f"batch-{batch}.npz",
                tokens=responses.tokens,
                prompt_lens=responses.prompt_lens,
                response_lens=responses.response_lens,
                behaviour_logprobs=np.concatenate([r.logprobs for r in results]),
                rewards=np.array(rewards, np.float64),
                group_ids=np.repeat(np.arange(GROUPS, dtype=np.int64) + batch * GROUPS, SAMPLES),
            )
            print(json.dumps({"batch": batch, "reward": float(np.mean(np.array(rewards, float)))}))
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(record())

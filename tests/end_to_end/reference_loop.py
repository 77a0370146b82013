"""What Relax computes, without what it is made of: one process, one loop, no messages, no services, no clock.

    python tests/end_to_end/reference_loop.py TOPOLOGY

Each round samples P groups with the present weights, pays every sample, turns rewards into advantages, takes the
optimizer's steps and gives the new weights to the engine. A lockstep run of the same topology file with one rollout
replica computes the same numbers to the bit (test_lockstep_reference.py), so this file is also the shortest way to see
what the services do together. It knows the algorithms that need neither a critic nor a reference, in fp32.
"""

import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax.algorithms import registry, signal
from relax.algorithms.contracts import services_needed
from relax.algorithms.objective import Denominators, objective
from relax.algorithms.proximal import proximal_source
from relax.config.options import Options
from relax.config.resolve import resolve
from relax.data import Prompt, PromptRules, PromptStream, PromptTokenizer, open_source
from relax.data.seeds import sample_seed
from relax.engines.base import Request, Result
from relax.engines.vllm import VllmEngine
from relax.megatron import batches
from relax.megatron.policy import Policy
from relax.rewards import VerifierSpec
from relax.rewards.verifiers import build
from relax.weights.manifest import Manifest
from relax.weights.store import ChunkStore

Batch = dict[str, np.ndarray]
Rows = list[dict[str, Any]]
SECONDS = 120.0  # for each wait on the engine or the prompts


@dataclass(frozen=True, slots=True)
class Sample:
    group: int
    prompt: Prompt
    result: Result

    @property
    def tokens(self) -> np.ndarray:
        return self.result.token_ids


class ReferenceLoop:
    """A run in lockstep. `run` gives the numbers of each batch under the names that they have in metrics.jsonl, and
    beside them `digest` of the weights that sampled it, `versions` of its tokens and the `responses`."""

    def __init__(self, options: Options, engine: VllmEngine, store: ChunkStore) -> None:
        o = self.options = options
        assert not services_needed(o) and o.max_staleness == 0 and o.num_rollout is not None
        self.engine, self.store, self.num_batches = engine, store, o.num_rollout
        self.spec = registry.get(o.advantage_estimator)
        self.tokenizer = PromptTokenizer(o.hf_checkpoint)
        self.reward = build(VerifierSpec.from_options(o))
        rules = PromptRules(o.input_key, o.apply_chat_template, o.rollout_max_prompt_len, o.overlong_prompts)
        self.prompts = PromptStream(open_source(o.prompt_data, seed=o.seed), self.tokenizer, rules, seed=o.seed)
        self.policy = Policy(o, o.hf_checkpoint, self.num_batches * o.num_steps_per_rollout)

    async def run(self) -> Rows:
        rows = []
        for b in range(self.num_batches):
            manifest = await self.serve(b)
            samples = await self.sample(b)
            batch = self.learnable(samples, self.score(samples))
            numbers = self.train(b, batch)
            versions = sorted({version for s in samples for version, _ in s.result.runs})
            responses = [self.tokenizer.decode(s.tokens) for s in samples]
            seen = {"batch": b, "digest": manifest.tag.digest, "versions": versions, "responses": responses}
            rows.append(seen | {"rollout/raw_reward": float(np.nanmean(batch["rewards"]))} | numbers)
        return rows

    async def serve(self, version: int) -> Manifest:
        """The policy's weights become those that the engine samples with."""
        step = version * self.options.num_steps_per_rollout
        manifest = self.store.publish(self.policy.state(), run_id="reference", lineage=0, version=version, step=step)
        await self.engine.load(manifest, self.store.directory, deadline=SECONDS)
        return manifest

    async def sample(self, b: int) -> list[Sample]:
        """The next P prompts, n responses to each. Every sample draws from a seed of its own."""
        o = self.options
        requests, asked = [], []
        for group in range(b * o.rollout_batch_size, (b + 1) * o.rollout_batch_size):
            prompt = await self.prompts.next(SECONDS)
            assert prompt is not None
            for i in range(o.n_samples_per_prompt):
                request = Request(
                    id=f"{group}.{i}",
                    prompt=prompt.token_ids,
                    max_tokens=o.rollout_max_response_len,
                    temperature=o.rollout_temperature,
                    top_p=o.rollout_top_p,
                    top_k=o.rollout_top_k,
                    seed=sample_seed(o.seed, prompt.epoch, prompt.prompt_id, i, 0),
                )
                requests.append(request)
                asked.append((group, prompt))
        async with asyncio.timeout(SECONDS):
            results = await asyncio.gather(*await self.engine.submit(requests, together=True))
        return [Sample(group, prompt, result) for (group, prompt), result in zip(asked, results, strict=True)]

    def score(self, samples: list[Sample]) -> np.ndarray:
        """float64 [samples], NaN where the reward function abstains."""
        rewards = []
        for s in samples:
            row = json.loads(s.prompt.row)
            label = row.get(self.options.label_key) if self.options.label_key else None
            reward = self.reward(self.tokenizer.decode(s.prompt.token_ids), self.tokenizer.decode(s.tokens), label, row)
            rewards.append(np.nan if reward is None else reward)
        return np.array(rewards, np.float64)

    def learnable(self, samples: list[Sample], rewards: np.ndarray) -> Batch:
        """What the policy trains on: the samples laid end to end, each token with its advantage."""
        lens = np.array([len(s.tokens) for s in samples], np.int32)
        batch: Batch = {
            "tokens": np.concatenate([part for s in samples for part in (s.prompt.token_ids, s.tokens)]),
            "prompt_lens": np.array([len(s.prompt.token_ids) for s in samples], np.int32),
            "response_lens": lens,
            "loss_mask": np.repeat(~np.isnan(rewards), lens).astype(np.uint8),
            "behaviour_logprobs": np.concatenate([s.result.logprobs for s in samples]),
            "rewards": rewards,
            "group_ids": np.array([s.group for s in samples], np.int64),
        }
        made = signal.batch_advantages(self.spec, self.options, rewards, batch["group_ids"], lens, batch["loss_mask"])
        return batch | {"advantages": made.advantages}

    def train(self, b: int, batch: Batch) -> dict[str, float]:
        """The optimizer's steps over contiguous parts of the batch. Old log-probs are those before the first step."""
        if proximal_source(self.spec, self.options) == "recomputed":
            batch |= {"proximal_logprobs": self.policy.logprobs(batch)}
        sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        for part in batches.split(batch, self.options.global_batch_size):
            whole = Denominators.of(part["loss_mask"], part["rewards"])

            def loss(current: Any, entropy: Any, fields: Any, whole: Denominators = whole) -> tuple[Any, Any]:
                result = objective(self.spec, self.options, current, entropy, fields, whole)
                return result.loss, result.metrics

            step = self.policy.train(part, loss)
            for name, sum_and_count in (*step.metrics.items(), ("train/grad_norm", (step.grad_norm, 1))):
                sums[name] += sum_and_count
        return {name: float(total / count) for name, (total, count) in sums.items()}


async def main(topology: str, *loops: type[ReferenceLoop]) -> dict[str, Rows]:
    """The rows of each of `loops`, one after the other on one engine, by the name of its class."""
    options = resolve({}, Path(topology)).options
    rows = {}
    engine = VllmEngine.from_options(options)
    try:
        await engine.start()
        for loop in loops:
            with tempfile.TemporaryDirectory() as folder:
                reference = loop(options, engine, ChunkStore(folder))
                rows[loop.__name__] = await reference.run()
                reference.prompts.close()
    finally:
        await engine.shutdown()
    return rows


if __name__ == "__main__":
    for row in asyncio.run(main(sys.argv[1], ReferenceLoop))["ReferenceLoop"]:
        print(json.dumps(row))

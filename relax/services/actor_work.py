"""What every rank of the actor does, in step: train a batch, write the export, and beside it give out the weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from relax.algorithms import registry
from relax.algorithms.objective import Denominators, objective, proximal_source
from relax.algorithms.tensors import LOG_RATIO_LIMIT
from relax.config.options import Options
from relax.megatron.network import LossFunction
from relax.megatron.policy import Policy
from relax.megatron.staging import Staging
from relax.metrics import Metrics
from relax.protocol.tensors import Arrays
from relax.services.learner_work import LearnerWork
from relax.services.ranks import command, in_lane

PUBLICATION = "publication"
"""The lane in which staged weights are read."""

STAGED_VERSIONS = 2
"""One that is read, and the newest."""


class ActorWork(LearnerWork):
    """The policy and what is done with it."""

    def __init__(self, options: Options, total_steps: int | None) -> None:
        """`total_steps`: optimizer steps of the run, None when unknown."""
        self.spec = registry.get(options.advantage_estimator)
        self.policy = Policy(options, options.hf_checkpoint, total_steps)
        self.staging = Staging(self.policy.network, STAGED_VERSIONS)
        super().__init__(options, self.policy)

    def complete(self, batch: Arrays, metrics: Metrics) -> Arrays:
        """With proximal log-probs, where they are the ones of the weights before the first step."""
        if proximal_source(self.spec, self.options) != "recomputed":
            return batch
        whole = dict(batch) | {"proximal_logprobs": self.policy.logprobs(batch)}
        _extremes(metrics, whole, self.options.use_tis)
        return whole

    def loss_of(self, denominators: Denominators) -> LossFunction:
        def loss(current: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Any]:
            result = objective(self.spec, self.options, current, entropy, fields, denominators)
            return result.loss, result.metrics

        return loss

    @command
    def stage(self, place: int) -> None:
        """Copies the present weights into `place` of the staging, where `weights` reads them while training goes on."""
        self.staging.fill(place)

    @in_lane(PUBLICATION)
    def weights(self, place: int) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of what was staged in `place`, which must not be staged to meanwhile."""
        return self.policy.network.state(self.staging[place])

    @command
    def export(self, path: str) -> None:
        """Writes a Hugging Face model directory."""
        self.policy.save_hf(Path(path))


def _extremes(metrics: Metrics, arrays: Arrays, weights: bool) -> None:
    """How far proximal and behaviour log-probs lie apart at most; with `weights` the extreme importance weights, before
    any bound acts on them."""
    mask = arrays["loss_mask"].astype(bool)
    log_ratio = (arrays["proximal_logprobs"] - arrays["behaviour_logprobs"])[mask].astype(np.float64)
    # In lockstep this is what the engine and the trainer disagree by under equal weights.
    metrics.max("train/train_rollout_logprob_abs_diff_max", np.abs(log_ratio).max(initial=0.0))
    if weights and len(log_ratio):
        ratio = np.exp(log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        metrics.max("train/tis_max", ratio.max())
        metrics.min("train/tis_min", ratio.min())

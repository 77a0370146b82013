"""Adam as Megatron-Core builds it, stepped by a learning-rate schedule counted in optimizer steps."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


class NonFiniteGradientError(ArithmeticError):
    """The gradient of a step is NaN or infinite; the weights are as they were before the step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate of each optimizer step, the first being step 0.

    During the `warmup` first steps the rate rises linearly, lr (s + 1) / warmup, so that no step has rate 0. From then
    on it falls from lr at step `warmup` to min_lr at step `decay`, the first one after the last planned, and stays.
    """

    lr: float
    min_lr: float = 0.0
    style: str = "constant"
    warmup: int = 0
    decay: int | None = None

    def __post_init__(self) -> None:
        if self.style not in ("constant", "linear", "cosine"):
            raise ValueError(f"--lr-decay-style {self.style}: choose constant, linear or cosine")
        if not 0 <= self.min_lr <= self.lr and self.style != "constant":
            raise ValueError(
                f"--min-lr {self.min_lr} must lie between 0 and the learning rate {self.lr}: --lr, or the critic's "
                "--critic-lr"
            )
        if self.style != "constant" and (self.decay is None or self.decay <= 0):
            raise ValueError(
                f"--lr-decay-style {self.style} needs a number of optimizer steps, it was given {self.decay}: "
                "set --lr-decay-steps, or --num-rollout"
            )

    @classmethod
    def from_options(cls, options: Any, lr: float, total_steps: int | None) -> "Schedule":
        """`lr`: --lr or --critic-lr. `total_steps`: optimizer steps that this model takes in the whole run, None when
        unknown; a --lr-decay-steps that the user gave goes before it. Raises ValueError naming what to change."""
        if total_steps is not None and total_steps <= 0:
            raise ValueError(f"total_steps is {total_steps}; a run has at least one optimizer step")
        return cls(
            lr,
            options.min_lr,
            options.lr_decay_style,
            options.lr_warmup_steps,
            options.lr_decay_steps if options.is_set("lr_decay_steps") else total_steps or options.lr_decay_steps,
        )

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.style == "constant" or self.decay is None:
            return self.lr
        if step >= self.decay:
            return self.min_lr
        done = (step - self.warmup) / (self.decay - self.warmup)
        left = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * left


class Optimizer:
    """AdamW with decoupled weight decay (none on norms and biases) over a DistributedDataParallel network.

    float32 weights are updated in place; bfloat16 ones through float32 copies. The gradient is clipped to `clip_grad`
    in the norm over all ranks' parameters.
    """

    def __init__(self, network: Any, options: Any, schedule: Schedule) -> None:
        half = network.config.params_dtype == torch.bfloat16
        self.schedule = schedule
        self.clip_grad = options.clip_grad
        self._weight_decay = options.weight_decay
        config = OptimizerConfig(
            optimizer="adam",
            lr=schedule.lr,
            min_lr=schedule.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=half,
            params_dtype=network.config.params_dtype,
            # Loading its state with torch's AdamW is broken in three places in Megatron-Core 0.16.1.
            use_distributed_optimizer=False,
        )
        self.megatron = get_megatron_optimizer(config, [network], get_standard_config_overrides(config))
        self.restart()

    # --- state -------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """As before the first step: moments of 0, and float32 copies of the weights as they are now.

        What torch would do at the first step is done here, so that a checkpoint has the same tensors at any step.
        """
        for adam in self._adams():
            if not isinstance(adam, torch.optim.AdamW):
                raise TypeError(f"{type(adam)} keeps its state in another way than torch's AdamW, which is supported")
            for parameter in _parameters(adam):
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        self.megatron.reload_model_params()

    def sharded_state(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Moments, and float32 copies of bfloat16 weights, as dist_checkpointing describes them; the data are the live
        tensors. `model_state`: that of the model, before its factories are applied."""
        state = self.megatron.sharded_state_dict(model_state)
        for part in state.values() if len(self.megatron.chained_optimizers) > 1 else [state]:
            part.get("optimizer", part)["state"].pop("common_step", None)  # see `updates`
        return state

    @property
    def updates(self) -> int:
        """How often the weights were changed; Adam corrects its moments by it. Steps that were skipped do not count."""
        return max(int(adam.state[p]["step"]) for adam in self._adams() for p in _parameters(adam))

    @updates.setter
    def updates(self, updates: int) -> None:
        for adam in self._adams():
            for parameter in _parameters(adam):
                adam.state[parameter]["step"].fill_(updates)

    def _adams(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]

    # --- a step ------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def step(self, step: int) -> tuple[float, float]:
        """Applies the reduced gradients with the rate of `step`; returns (norm before clipping, rate).

        Raises NonFiniteGradientError, on every rank alike and before any weight changed.
        """
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteGradientError(f"the gradient norm of optimizer step {step} is {norm}; {self._suspects()}")
        if self.clip_grad > 0:
            for part in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.clip_grad, norm)
        rate = self.schedule.at(step)
        for group in self.megatron.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()
        return norm, rate

    def _suspects(self) -> str:
        parameters = [p for p in self.megatron.get_parameters() if p.grad is not None]
        bad = sum(not bool(torch.isfinite(p.grad).all()) for p in parameters)
        return f"{bad} of this rank's {len(parameters)} parameters have a gradient that is not finite"


def _parameters(adam: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in adam.param_groups for parameter in group["params"]]

"""Every option of Relax, once: name, type, default, one line of help. The class that declares it is its section.

An attribute `rollout_batch_size` is the flag `--rollout-batch-size` and the key `rollout_batch_size` (or
`rollout-batch-size`) under `options:` in a topology file. This module imports no torch and answers at once.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator

from relax.config.derive import derived_values
from relax.config.fields import opt

Estimator = Literal[
    "grpo",
    "gspo",
    "cispo",
    "sapo",
    "m2po",
    "rloo",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]
Dtype = Literal["float32", "bfloat16"]

# What may differ between the services of one run: where each of them finds it and its keys, and how much it logs.
PER_SERVICE = frozenset({"run_dir", "controller", "log_level", "keys", "resume"})

NEWEST = "newest"
"""The value of --resume that names no directory: the newest run of this name."""
NO_EVAL = "Evaluation during a run is not there yet; evaluate export/ afterwards."


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunOptions(Section):
    """Run"""

    run_dir: Path | None = opt(None, "directory of this run (default: runs/<name>-<n>, n counts up)")
    run_name: str = opt("relax", "name of the run; the topology file's run.name otherwise")
    controller: str | None = opt(None, "endpoint of the controller, for a service started alone", metavar="ENDPOINT")
    seed: int = opt(1234, "seed of data order and sampling", ge=0, lt=2**63)
    num_rollout: int | None = opt(None, "end after this many rollout batches", ge=1)
    num_epoch: int | None = opt(None, "end after this many passes over the prompts; the earlier end counts", ge=1)
    log_level: Literal["debug", "info", "warning", "error"] = opt("info", "least level written to the logs")
    resume: Path | None = opt(
        None,
        "go on with this run, or with the newest of this name, from its newest checkpoint",
        metavar="[RUN_DIR]",
        bare=NEWEST,
    )
    restart: bool = opt(False, "when actor, critic or controller die, resume by itself, within the restart budget")
    load: Path | None = opt(
        None,
        "start a new run with the models, optimizers and random generators of this checkpoint, or of that run's newest",
        metavar="CHECKPOINT",
    )
    no_load_optim: bool = opt(False, "with resume or load: a fresh optimizer, whose steps and schedule begin anew")
    no_load_rng: bool = opt(False, "with resume or load: the random generators of the seed")
    save: bool = opt(True, "write checkpoints")
    save_interval: int | None = opt(None, "batches between two checkpoints; one more is written at the end", ge=1)
    keep_checkpoints: int = opt(2, "checkpoints kept, the newest ones", ge=1)


class DataOptions(Section):
    """Data"""

    prompt_data: str = opt("", "JSONL or Parquet file, or reasoning_gym:<task>[?key=value&...]", required=True)
    input_key: str = opt("prompt", "column that holds the prompt")
    label_key: str | None = opt(None, "column that holds the reference answer")
    apply_chat_template: bool = opt(False, "put prompts through the tokenizer's chat template")
    rollout_max_prompt_len: int = opt(1024, "longest prompt, in tokens", ge=1)
    overlong_prompts: Literal["refuse", "filter"] = opt("refuse", "what happens to longer prompts")


class RewardOptions(Section):
    """Reward"""

    rm_type: Literal["reasoning_gym", "math", "exact_match"] | None = opt(None, "built-in reward")
    rm_exact: bool = opt(False, "reasoning_gym only: 1 where the task's own score is exactly 1, else 0")
    custom_rm_path: str | None = opt(
        None, "reward function of your own, in place of rm-type", metavar="MODULE:FUNCTION"
    )
    rm_timeout: float = opt(10.0, "seconds one sample may take to score; then the verifier is killed", gt=0)
    rm_workers: int = opt(1, "verifier processes per reward service", ge=1)


class RolloutOptions(Section):
    """Rollout"""

    hf_checkpoint: str = opt("", "directory of the Hugging Face model to start from", required=True, metavar="DIR")
    rollout_batch_size: int = opt(32, "P: prompts (groups) of a rollout batch", ge=1)
    n_samples_per_prompt: int = opt(8, "samples of a group", ge=1)
    rollout_max_response_len: int = opt(1024, "longest response, in tokens", ge=1)
    rollout_temperature: float = opt(1.0, "sampling temperature", gt=0)
    rollout_top_p: float = opt(1.0, "nucleus sampling", gt=0, le=1)
    rollout_top_k: int = opt(-1, "top-k sampling; -1 is off", ge=-1)
    rollout_dtype: Dtype = opt("float32", "dtype of the inference engine")
    rollout_max_num_seqs: int = opt(64, "sequences an engine runs at once", ge=1)
    rollout_kv_cache_mb: int = opt(64, "MiB of KV cache of an engine", ge=1)
    rollout_credit: int = opt(
        0,
        "groups a replica asks for at a time",
        ge=1,
        derived="rollout-max-num-seqs (sim-slots) / n-samples-per-prompt",
    )
    dynamic_sampling_filter_path: str | None = opt(
        None,
        "which groups are trained: relax.algorithms.filters:reward_is_not_constant, or a function of your own",
        metavar="MODULE:FUNCTION",
    )


class AsyncOptions(Section):
    """Asynchrony"""

    max_staleness: int = opt(0, "S: no sample older than this many batches is trained; 0 is lockstep", ge=0)
    rollout_lead: int = opt(0, "L: batches rollout may be ahead of training", ge=0, derived="min(max-staleness, 2)")
    update_weights_interval: int = opt(1, "k: every k-th version is published, and the last", ge=1)
    no_off_policy_correction: bool = opt(False, "train stale samples without any correction; say it explicitly")
    straggler_timeout: float | None = opt(
        None,
        "seconds a group may block a commit before it is dropped and drawn again (none: wait; 0: at once)",
        ge=0,
    )
    partial_rollout: bool = opt(
        False,
        "pause running samples for new weights instead of finishing them; a sample may then hold several versions",
    )
    mask_offpolicy_in_partial_rollout: bool = opt(
        False, "train a sample's tokens of its newest version alone; the older ones leave loss, deadline and staleness"
    )
    over_sampling_batch_size: int | None = opt(
        None,
        "groups sampled for a batch in lockstep; the P that are ready first are trained, which favours short responses",
        ge=1,
    )


class TrainOptions(Section):
    """Training"""

    num_steps_per_rollout: int = opt(
        0,
        "optimizer steps per rollout batch",
        ge=1,
        derived="rollout-batch-size x n-samples-per-prompt / global-batch-size, or 1",
    )
    global_batch_size: int = opt(
        0,
        "samples of one optimizer step",
        ge=1,
        derived="rollout-batch-size x n-samples-per-prompt / num-steps-per-rollout",
    )
    micro_batch_size: int = opt(8, "samples of one forward and backward pass", ge=1)
    train_dtype: Dtype = opt("float32", "dtype of the trainer's forward and backward pass")
    lr: float = opt(1e-6, "peak learning rate", ge=0)
    min_lr: float = opt(0.0, "learning rate at the end of the decay", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = opt("constant", "how the learning rate falls")
    lr_warmup_steps: int = opt(0, "optimizer steps of linear warm-up", ge=0)
    lr_decay_steps: int | None = opt(
        None,
        "optimizer steps until min-lr",
        ge=1,
        derived="(num-rollout - num-critic-only-steps) x num-steps-per-rollout, when num-rollout is set",
    )
    weight_decay: float = opt(0.01, "decoupled weight decay", ge=0)
    adam_beta1: float = opt(0.9, "Adam's first moment", ge=0, lt=1)
    adam_beta2: float = opt(0.95, "Adam's second moment", ge=0, lt=1)
    adam_eps: float = opt(1e-8, "Adam's epsilon", gt=0)
    clip_grad: float = opt(1.0, "largest gradient norm; 0 does not clip", ge=0)
    tensor_parallel_size: int = opt(1, "tensor-parallel ranks of the trainer", ge=1)
    pipeline_parallel_size: int = opt(1, "pipeline stages of the trainer", ge=1)
    context_parallel_size: int = opt(1, "context-parallel ranks of the trainer", ge=1)
    expert_parallel_size: int = opt(
        1, "expert-parallel ranks of the trainer", ge=1, unavailable="No mixture-of-experts model is supported yet."
    )
    sequence_parallel: bool = opt(False, "split activations along the sequence between tensor-parallel ranks")


class AlgorithmOptions(Section):
    """Algorithm"""

    advantage_estimator: Estimator = opt("grpo", "the algorithm")
    eps_clip: float = opt(0.2, "lower clip of the ratio", ge=0)
    eps_clip_high: float = opt(0.0, "upper clip of the ratio", ge=0, derived="eps-clip")
    eps_clip_c: float | None = opt(None, "dual clip of negative advantages", gt=1)
    gamma: float = opt(1.0, "discount", ge=0, le=1)
    lambd: float = opt(1.0, "lambda of GAE", ge=0, le=1)
    entropy_coef: float = opt(0.0, "weight of the entropy bonus", ge=0)
    normalize_advantages: bool = opt(False, "whiten advantages over the rollout batch")
    disable_grpo_std_normalization: bool = opt(False, "Dr.GRPO: rewards less their mean, not divided by their std")
    disable_rewards_normalization: bool = opt(False, "raw rewards in place of the group normalizer")
    calculate_per_token_loss: bool = opt(False, "mean over tokens, not over samples")
    sapo_tau_pos: float = opt(1.0, "SAPO's temperature where the advantage is positive", gt=0)
    sapo_tau_neg: float = opt(1.05, "SAPO's temperature elsewhere", gt=0)
    m2po_kl2_budget: float = opt(0.01, "M2PO's budget of the second moment", ge=0)
    m2po_miniclip_low: float = opt(0.3, "M2PO's least lower clip", ge=0)
    m2po_miniclip_high: float = opt(0.5, "M2PO's least upper clip", ge=0)
    use_rollout_logprobs: bool = opt(False, "the engine's log-probs are the proximal ones")
    true_on_policy_mode: bool = opt(False, "proximal := current, ratio exactly 1; lockstep, one step per rollout")


class CorrectionOptions(Section):
    """Off-policy correction"""

    use_tis: bool = opt(False, "truncated importance sampling, proximal against behaviour")
    tis_clip: float = opt(2.0, "largest weight", gt=0)
    tis_clip_low: float = opt(0.0, "least weight", ge=0)
    tis_mode: Literal["truncate", "icepop"] = opt("truncate", "outside the bounds: truncated, or set to 0")
    use_opsm: bool = opt(False, "mask off-policy sequences with negative advantage")
    opsm_delta: float = opt(1e-4, "divergence from which a sequence is masked")
    custom_tis_path: str | None = opt(None, "weight of your own, with use-tis", metavar="MODULE:FUNCTION")


class KlOptions(Section):
    """KL, reference and critic"""

    kl_coef: float = opt(0.0, "weight of the KL in the reward", ge=0)
    use_kl_loss: bool = opt(False, "a KL term in the loss")
    kl_loss_coef: float = opt(0.0, "weight of the KL in the loss", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = opt("k3", "estimator")
    use_unbiased_kl: bool = opt(False, "KL times the importance ratio")
    ref_load: Path | None = opt(None, "checkpoint of the reference policy")
    ref_update_interval: int | None = opt(None, "batches between two refreshes of the reference", ge=1)
    value_clip: float = opt(0.2, "clip of the value loss", ge=0)
    critic_lr: float = opt(0.0, "learning rate of the critic", ge=0, derived="lr")
    num_critic_only_steps: int = opt(0, "batches in which only the critic trains", ge=0)
    custom_reward_post_process_path: str | None = opt(None, "reward normalizer of your own", metavar="MODULE:FUNCTION")
    custom_advantage_path: str | None = opt(None, "advantage function of your own", metavar="MODULE:FUNCTION")
    custom_loss_path: str | None = opt(None, "policy loss of your own", metavar="MODULE:FUNCTION")


class EvalOptions(Section):
    """Evaluation"""

    eval_interval: int | None = opt(None, "batches between two evaluations", ge=1, unavailable=NO_EVAL)
    eval_prompt_data: str | None = opt(None, "prompts of the evaluation", unavailable=NO_EVAL)
    eval_replicas: int | None = opt(None, "rollout replicas kept for evaluation", ge=1, unavailable=NO_EVAL)


class SystemOptions(Section):
    """System"""

    startup_timeout: float = opt(300.0, "seconds until every service must have registered", gt=0)
    peer_timeout: float = opt(60.0, "seconds of silence after which a peer counts as dead", gt=0)
    stall_timeout: float = opt(
        600.0, "seconds without progress after which a service is started again and a run ends, saying why", gt=0
    )
    restart_budget: str = opt(
        "3/600", "restarts of each service / within so many seconds; beyond, the run ends", metavar="N/SECONDS"
    )
    keys: Path | None = opt(
        None, "directory with the run's key, from relax-launch --keygen; needed beyond this host", metavar="DIR"
    )
    insecure: bool = opt(False, "allow plain TCP beyond this host; anyone who reaches the port can join the run")


class SimulationOptions(Section):
    """Simulation"""

    sim_length: str = opt(
        "lognormal:200,1",
        "response lengths in tokens: constant:N, lognormal:MEAN,SIGMA, pareto:MIN,ALPHA or file:PATH (one a line)",
        metavar="MODEL",
    )
    sim_tokens_per_second: str = opt(
        "1000", "speed of one slot; with commas one a replica, from the first again after the last", metavar="N[,N...]"
    )
    sim_slots: int = opt(0, "samples that a simulated replica runs at once", ge=1, derived="rollout-max-num-seqs")
    sim_train_seconds: float = opt(1.0, "seconds that training on a batch takes", ge=0)
    sim_publish_seconds: float = opt(0.1, "seconds that a publication takes, beside the next batch", ge=0)


SECTIONS: tuple[type[Section], ...] = (
    RunOptions,
    DataOptions,
    RewardOptions,
    RolloutOptions,
    AsyncOptions,
    TrainOptions,
    AlgorithmOptions,
    CorrectionOptions,
    KlOptions,
    EvalOptions,
    SystemOptions,
    SimulationOptions,
)


class Options(
    SimulationOptions,
    SystemOptions,
    EvalOptions,
    KlOptions,
    CorrectionOptions,
    AlgorithmOptions,
    TrainOptions,
    AsyncOptions,
    RolloutOptions,
    RewardOptions,
    DataOptions,
    RunOptions,
):
    """The options of one run: immutable, complete, every derived value filled in.

    `Options(rollout_batch_size=4, n_samples_per_prompt=2)` has `global_batch_size == 8`. Raises
    pydantic.ValidationError on an unknown name, a wrong type or a value out of range; what depends on several options
    or on the machine is checked by relax.config.checks.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _fill_derived(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict):
            return handler(values)
        given = {name: value for name, value in values.items() if not (value is None and name in DERIVED)}
        filled = handler({**derived_values(given, _default), **given})
        # A derived value is not one that the user set: contracts ask for that difference.
        object.__setattr__(filled, "__pydantic_fields_set__", set(given) & set(cls.model_fields))
        return filled

    def is_set(self, name: str) -> bool:
        """Whether the user gave this option (by flag, topology file or constructor), whatever its value."""
        return name in self.model_fields_set


def _default(name: str) -> Any:
    return Options.model_fields[name].default


DERIVED = frozenset(derived_values({"num_rollout": 1}, _default))
"""Names of the options that are computed from others when they are not given."""

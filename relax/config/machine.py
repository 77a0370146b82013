"""Whether this machine can run what the options and the topology ask for: the checkpoint, the prompts and how they
fill the last batch, the reward function, hooks, keys, shared memory, cores. Reads files, starts no service, imports no
torch.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax.config.checkpoint import Checkpoint, read_checkpoint, read_config
from relax.config.checks import located
from relax.config.fields import flag
from relax.config.keys import KeyProblem, read_secret
from relax.config.options import Options
from relax.config.resolve import Resolved
from relax.config.schema import RANKED, ROLES
from relax.config.simulated import is_simulated
from relax.config.tail import READS as TAIL_READS
from relax.config.tail import check_tail
from relax.config.violation import Violation

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
SHM = Path("/dev/shm")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
VERSIONS_KEPT = 2


def check_machine(resolved: Resolved, node: str | None = None) -> list[Violation]:
    """Every reason why the services of `node` (all for None) cannot run here."""
    from relax.algorithms.hooks import check as check_hooks
    from relax.data.checks import check as check_data
    from relax.rewards.checks import check as check_rewards
    from relax.simulation.checks import check as check_simulation

    options, skip = resolved.options, resolved.suspects
    roles = {service.role for service in resolved.topology.on(node)} if resolved.topology else set(ROLES)
    found: list[Violation] = []
    if resolved.topology is not None and is_simulated(resolved.topology):
        found += check_simulation(options, len(resolved.topology.role("rollout")))
    if options.hf_checkpoint and "hf_checkpoint" not in skip:
        # A node that refreshes the reference keeps the policy's versions too.
        holders = {"rollout", "actor"} | ({"reference"} if options.ref_update_interval is not None else set())
        if is_simulated(resolved.topology):
            found += _tokenizer(options, Path(options.hf_checkpoint))
        else:
            found += check_checkpoint(options, holds_weights=bool(roles & holders))
            found += _fits_the_ranks(resolved, node)
    if "reference" in roles and options.ref_load is not None and not skip & {"ref_load", "hf_checkpoint"}:
        found += check_reference(options)
    if "controller" in roles and options.prompt_data and not skip & {"prompt_data", "input_key", "label_key"}:
        found += check_data(options)
        found += check_tail(options) if skip.isdisjoint(TAIL_READS) else []
    if "reward" in roles and not skip & {"rm_type", "custom_rm_path"}:
        found += check_rewards(options, resolved.sources)
    found += check_hooks(options, roles)
    found += _keys(options) if "keys" not in skip else []
    found += _cores(resolved, node)
    return located(resolved, found)


def _keys(options: Options) -> list[Violation]:
    try:
        if options.keys is not None:
            read_secret(options.keys)
    except KeyProblem as problem:
        return [problem.violation]
    return []


def check_checkpoint(options: Options, *, holds_weights: bool = True) -> list[Violation]:
    """What is wrong with --hf-checkpoint: not there, incomplete, another architecture, too short for the samples; and,
    where this host `holds_weights`, whether they fit into its shared memory."""
    folder = Path(options.hf_checkpoint)
    read = read_checkpoint(folder)
    found = _faults(options, "hf_checkpoint", read)
    if read.config is None:
        return found
    found += _tokenizer(options, folder)
    if holds_weights and read.elements is not None:
        found += _room(options, read.elements)
    return [*found, *_fits_the_context(options, read.config)]


def check_reference(options: Options) -> list[Violation]:
    """What is wrong with --ref-load: what makes a checkpoint unusable, another vocabulary than the policy has, tensors
    that versions of the policy could not take the place of, where it is refreshed by them."""
    from relax.weights.checkpoint import checkpoint_shapes

    assert options.ref_load is not None
    read, policy = read_checkpoint(options.ref_load), read_checkpoint(Path(options.hf_checkpoint))
    if read.config is None or read.shapes is None or policy.config is None or policy.shapes is None:
        return _faults(options, "ref_load", read)
    theirs, ours = read.config.get("vocab_size"), policy.config.get("vocab_size")
    if theirs != ours:
        problem = f"has a vocabulary of {theirs} tokens, --hf-checkpoint {options.hf_checkpoint} one of {ours}"
        return [_refuse(options, "ref_load", problem, "Name a checkpoint with the policy's tokenizer.")]
    if options.ref_update_interval is not None:
        theirs, ours = checkpoint_shapes(options.ref_load), checkpoint_shapes(options.hf_checkpoint)
        if theirs != ours:
            name = next(n for n in sorted(theirs.keys() | ours.keys()) if theirs.get(n) != ours.get(n))
            problem = (
                f"versions of the policy could not take its place: {name} is {theirs.get(name)} there and "
                f"{ours.get(name)} in --hf-checkpoint"
            )
            fix = "Name a checkpoint of the policy's shape, or leave --ref-update-interval out."
            return [_refuse(options, "ref_load", problem, fix)]
    return []


def _refuse(options: Options, name: str, problem: str, fix: str) -> Violation:
    return Violation(flag(name), str(getattr(options, name)), problem, fix)


def _faults(options: Options, name: str, read: Checkpoint) -> list[Violation]:
    return [_refuse(options, name, problem, fix) for problem, fix in read.faults]


def _tokenizer(options: Options, folder: Path) -> list[Violation]:
    from relax.data.errors import DataError
    from relax.data.tokenize import PromptTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        fix = "Save the tokenizer beside the model."
        return [_refuse(options, "hf_checkpoint", "has no tokenizer (tokenizer.json)", fix)]
    try:
        PromptTokenizer(folder)
    except DataError as error:
        return [_refuse(options, "hf_checkpoint", error.problem, error.fix)]
    return []


def _room(options: Options, elements: int) -> Iterator[Violation]:
    needed = VERSIONS_KEPT * elements * ITEM_BYTES[options.train_dtype]
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    if needed > free:
        problem = (
            f"shared memory is too small: {VERSIONS_KEPT} versions of its {elements:,} weights in "
            f"{options.train_dtype} take {needed / 2**20:,.1f} MiB, and {SHM} has {free / 2**20:,.1f} MiB free"
        )
        fix = (
            f"Free or enlarge it (mount -o remount,size=... {SHM}; docker run --shm-size=...), or take a smaller model."
        )
        yield Violation("--hf-checkpoint", options.hf_checkpoint, problem, fix)


def _fits_the_ranks(resolved: Resolved, node: str | None) -> Iterator[Violation]:
    """The parallel sizes of every service with a model against that model."""
    services = resolved.topology.on(node) if resolved.topology else ()
    for service in services:
        if service.role not in RANKED:
            continue
        options = service.options(resolved.options)
        folder = options.ref_load if service.role == "reference" else options.hf_checkpoint
        config = read_config(Path(folder))[0] if folder else None
        for size, problem, fix in _sizes_that_do_not_fit(options, config or {}):
            own = size in service.sizes
            name = f"services.{service.role}.{size}" if own else flag(size)
            yield Violation(name, getattr(options, size), problem, fix, service.source if own else "")


def _sizes_that_do_not_fit(options: Options, config: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(option, problem, fix)"""
    tensor, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    heads = config.get("num_attention_heads")
    for key, count in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", config.get("num_key_value_heads", heads)),
        ("intermediate_size", config.get("intermediate_size")),
    ):
        if isinstance(count, int) and count % tensor:
            yield "tensor_parallel_size", f"does not divide the model's {key}, {count}", f"Choose a divisor of {count}."
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers % stages:
        problem = f"does not divide the model's {layers} layers"
        yield "pipeline_parallel_size", problem, f"Choose a divisor of {layers}."


def _fits_the_context(options: Options, config: dict[str, Any]) -> Iterator[Violation]:
    longest = options.rollout_max_prompt_len + options.rollout_max_response_len
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and longest > limit:
        problem = (
            f"with --rollout-max-prompt-len {options.rollout_max_prompt_len} a sample may have {longest} tokens; "
            f"the model takes {limit}"
        )
        fix = f"Keep the sum of the two at or below {limit}."
        yield Violation("--rollout-max-response-len", options.rollout_max_response_len, problem, fix)


def _cores(resolved: Resolved, node: str | None) -> Iterator[Violation]:
    topology = resolved.topology
    # Without --node, services that name other hosts are only planned here.
    if topology is None or (node is None and topology.spans_hosts):
        return
    here = os.sched_getaffinity(0)
    for service in topology.on(node):
        missing = sorted(set(service.cores) - here)
        if missing:
            problem = f"this process may run on cores {', '.join(map(str, sorted(here)))} only"
            fix = "List cores of this machine, or leave `cores` out."
            yield Violation(f"services.{service.role}.cores", list(service.cores), problem, fix, service.source)

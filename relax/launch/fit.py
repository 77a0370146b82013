"""Whether the models of a checkpoint fit those of a run: by the text files of both, before anything starts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax.checkpoints import Checkpoint, CheckpointError
from relax.checkpoints.model_state import ModelState, grid_text
from relax.checkpoints.parts import PartError
from relax.config.checkpoint import read_config
from relax.config.checks import model_ranks
from relax.config.fields import flag
from relax.config.resolve import Resolved
from relax.config.topology import Service
from relax.config.violation import Violation

# What an architecture is told by in state.json, and in a Hugging Face config.json, which may leave some of it out.
_SIZES = {
    "model_type": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
}


def unfit(made: Checkpoint, resolved: Resolved, roles: Sequence[str], option: str) -> Iterator[Violation]:
    """Why the services of `roles` cannot take over their part of `made`, which `option` named. What no text file tells
    of, each finds out when it loads."""
    assert resolved.topology is not None
    for role in roles:
        (service,) = resolved.topology.role(role)
        try:
            state = ModelState.read(made.part(role))
        except (CheckpointError, PartError) as error:
            fix = "Name a checkpoint of a run that has one, or begin with export/ of its run as --hf-checkpoint."
            yield Violation(option, str(made.path), str(error), fix)
        else:
            yield from _differences(made, state, resolved, service, option)


def _differences(
    made: Checkpoint, state: ModelState, resolved: Resolved, service: Service, option: str
) -> Iterator[Violation]:
    options, role = service.options(resolved.options), service.role
    model = "ref_load" if role == "reference" else "hf_checkpoint"
    folder = getattr(options, model)
    config = (read_config(Path(folder))[0] if folder else None) or {}
    for ours, theirs in _SIZES.items():
        saved, here = state.architecture.get(ours), config.get(theirs)
        if here is not None and saved != here:
            problem = f"its {role} is of another model: {theirs} is {saved}, and {here} in {flag(model)} {folder}"
            yield Violation(option, str(made.path), problem, f"Give the {flag(model)} of the run that wrote it.")
            return
    if state.dtype != options.train_dtype:
        problem = f"the {role} in {made.path} was trained in {state.dtype}"
        yield Violation(flag("train_dtype"), options.train_dtype, problem, f"Give --train-dtype {state.dtype}.")
    if not options.no_load_rng and state.grid != (grid := _grid(service, resolved)):
        problem = (
            f"its {role} was on {grid_text(state.grid)}, here it is on {grid_text(grid)}, and random generators belong "
            "to a rank"
        )
        fix = "Give --no-load-rng, as weights and optimizer fit any sizes; or give the same sizes."
        yield Violation(option, str(made.path), problem, fix)


def _grid(service: Service, resolved: Resolved) -> dict[str, Any]:
    """The grid that a service will be on, as state.json tells of one."""
    options = service.options(resolved.options)
    copy = model_ranks(options)
    world = service.ranks or copy
    return {
        "world": world,
        "tensor": options.tensor_parallel_size,
        "pipeline": options.pipeline_parallel_size,
        "context": options.context_parallel_size,
        "data": world // copy,
        "sequence_parallel": options.sequence_parallel and options.tensor_parallel_size > 1,
    }

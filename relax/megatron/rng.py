"""The random generators of this process as tensors, and back: torch's, CUDA's, Megatron's, numpy's and Python's."""

import json
import random
from typing import Any, cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor

_TRACKER = "megatron."  # its generators, by name


def take() -> tuple[dict[str, Tensor], dict[str, str]]:
    """(states, what of them is no tensor), both new."""
    kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    version, internal, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "python": torch.tensor(internal, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    tensors |= {_TRACKER + name: state.clone() for name, state in tracker.items()}
    rest = {"numpy": [kind, position, has_gauss, gauss], "python": [version, gauss_next]}
    return tensors, {name: json.dumps(value) for name, value in rest.items()}


def lacking(tensors: dict[str, Tensor], rest: dict[str, str]) -> list[str]:
    """Generators of this process that have no state in what `take` gave somewhere."""
    wanted = {"torch", "numpy", "python"} | ({"cuda"} if torch.cuda.is_available() else set())
    wanted |= {_TRACKER + name for name in tensor_parallel.get_cuda_rng_tracker().get_states()}
    return sorted((wanted - tensors.keys()) | ({"numpy", "python"} - rest.keys()))


def put(tensors: dict[str, Tensor], rest: dict[str, str]) -> None:
    """Sets all generators to what `take` gave, which must lack none."""
    kind, position, has_gauss, gauss = json.loads(rest["numpy"])
    version, gauss_next = json.loads(rest["python"])
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: tensors[_TRACKER + name].clone() for name in tracker.get_states()})

"""Makes Megatron-Core run where there is no GPU.

Megatron-Core writes `device="cuda"` and `torch.cuda.current_device()` into its source. On a machine without CUDA an
import hook rewrites those expressions in the syntax tree of each `megatron.core` module as it is imported, so that the
library's own model, schedules, optimizers and checkpoints run on CPU over gloo. Where CUDA exists nothing is touched.
"""

import ast
import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

import torch

_PACKAGE = "megatron.core"

# torch.cuda.NAME(...) -> the expression that means the same on CPU.
_CONSTANT_CALLS = {
    "current_device": "torch.device('cpu')",
    "synchronize": "None",
    "empty_cache": "None",
    "set_device": "None",
    "is_current_stream_capturing": "False",
    "current_stream": "None",
}
# torch.cuda.NAME(state, device...) -> torch.NAME with so many of its arguments.
_RNG_CALLS = {"manual_seed": 1, "get_rng_state": 0, "set_rng_state": 1}


class _CudaToCpu(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value == "cuda" or node.value.startswith("cuda:"):
                return ast.copy_location(ast.Constant("cpu"), node)
            # Tensor types are compared by name when gradients are bucketed.
            if node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
                return ast.copy_location(ast.Constant(node.value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant) and node.value.value is True:
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        owner, name = ast.unparse(node.func.value), node.func.attr
        if owner == "torch.cuda" and name in _CONSTANT_CALLS:
            replacement = ast.parse(_CONSTANT_CALLS[name], mode="eval").body
        elif owner == "torch.cuda" and name in _RNG_CALLS:
            function = ast.parse(f"torch.{name}", mode="eval").body
            replacement = ast.Call(function, node.args[: _RNG_CALLS[name]], [])
        elif name == "cuda" and owner != "torch":  # tensor.cuda(...)
            return node.func.value
        else:
            return node
        return ast.copy_location(ast.fix_missing_locations(replacement), node)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Compiled from source each time: the cached .pyc of the unchanged library must be neither used nor written.
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(_CudaToCpu().visit(ast.parse(self.get_data(path), path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            # Before anyone imports jit_fuser from it: it would be torch.compile, minutes of compilation on CPU.
            module.disable_jit_fuser()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def enable() -> None:
    """Prepares this process for Megatron-Core. Does nothing with CUDA, or when called again.

    Raises RuntimeError when `megatron.core` was imported before: its modules then already hold CUDA calls.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before relax.megatron, so its CUDA calls can no longer be replaced on this "
            "machine without a GPU; import relax.megatron first"
        )
    sys.meta_path.insert(0, _Finder())
    with warnings.catch_warnings():
        # Megatron names six optional GPU packages that are missing; here they are meant to be.
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
        from megatron.core.tensor_parallel import random as megatron_random
    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    # Warns at each use that the CPU generator is shared, which is the intention.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)


def device() -> torch.device:
    """The device of this process's model: its CUDA device if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

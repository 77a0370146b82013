"""The preparation of Megatron-Core for machines without a GPU."""

import ast
import subprocess
import sys

import pytest
import torch

from relax.megatron import cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("torch.empty(2, device=torch.cuda.current_device())", "torch.empty(2, device=torch.device('cpu'))"),
        ("x.cuda(non_blocking=True) + y", "x + y"),
        ("torch.cuda.set_rng_state(state, device)", "torch.set_rng_state(state)"),
        ("p.type() == 'torch.cuda.FloatTensor'", "p.type() == 'torch.FloatTensor'"),
        ("t(pin_memory=True)", "t(pin_memory=False)"),
        ("x.cpu()", "x.cpu()"),
        ("name = 'cuda graph'", "name = 'cuda graph'"),
    ],
)
def test_cuda_calls_become_cpu_calls(source, expected):
    tree = ast.fix_missing_locations(cpu._CudaToCpu().visit(ast.parse(source)))
    assert ast.unparse(tree) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA any order works")
def test_importing_megatron_first_is_an_error_that_says_what_to_do():
    code = "import megatron.core; import relax.megatron"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "import relax.megatron first" in done.stderr

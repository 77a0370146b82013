"""Every recorded vector, in float64 and float32: values, gradients by autograd, diagnostics, reductions."""

import json
from pathlib import Path

import pytest
import torch

from relax.algorithms import advantages, corrections, kl, losses, normalizers, reduce

ORACLES = Path(__file__).parent / "oracles"
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
TOLERANCE = {torch.float64: {"rtol": 0, "atol": 1e-6}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}


def cases(name):
    return [
        pytest.param(case, id=str(i))
        for i, case in enumerate(json.loads((ORACLES / f"{name}.json").read_text())["cases"])
    ]


def same(seen, expected, dtype):
    seen = torch.as_tensor(seen)
    torch.testing.assert_close(seen.double(), torch.tensor(expected, dtype=torch.float64), **TOLERANCE[dtype])


def tensors(case, dtype, *names):
    return [torch.tensor(case[name], dtype=dtype) for name in names]


def all_losses():
    for name in ("ppo_clip", "gspo", "cispo", "sapo", "m2po", "rloo"):
        for i, case in enumerate(json.loads((ORACLES / f"loss_{name}.json").read_text())["cases"]):
            yield pytest.param(name, case, id=f"{name}-{i}")


@PRECISIONS
@pytest.mark.parametrize(("name", "case"), all_losses())
def test_loss_gradient_diagnostics_and_reductions(name, case, dtype):
    mask, logp, old, A = tensors(case, dtype, "mask", "logp", "old_logp", "advantages")
    logp.requires_grad_()
    inputs = {"rloo": (logp, A), "gspo": (logp, old, A, mask)}.get(name, (logp, old, A))
    token = getattr(losses, name)(*inputs, **case["options"])
    assert token.loss.dtype == dtype
    same(token.loss, case["loss"], dtype)
    # gspo's gradient is recorded of the valid tokens' sum: its ratio ties the tokens of a row together.
    total = (token.loss * mask).sum() if name == "gspo" else token.loss.sum()
    (grad,) = torch.autograd.grad(total, logp)
    same(grad, case["grad"], dtype)
    diagnostics = case["diagnostics"]
    if "clipped" in diagnostics:
        same(token.clipped, diagnostics["clipped"], dtype)
    if name == "m2po":
        renamed = {"m2_before": "ppo_kl_m2_before", "m2_after": "ppo_kl_m2_after", "eps_low": "m2po_eps_low"}
        for recorded, scalar in (renamed | {"eps_high": "m2po_eps_high"}).items():
            same(token.scalars[scalar], diagnostics[recorded], dtype)
    else:
        assert token.scalars == {}
    same(reduce.per_token(token.loss, mask), case["per_token"], dtype)
    same(reduce.per_sample(token.loss, mask), case["per_sample"], dtype)


@pytest.mark.parametrize("case", cases("group_advantages"))
@pytest.mark.parametrize("as_tensor", [True, False])
def test_reward_normalizers(case, as_tensor):
    rewards = torch.tensor(case["rewards"], dtype=torch.float64) if as_tensor else case["rewards"]
    same(normalizers.group_mean_std(rewards), case["group_mean_std"], torch.float64)
    without_std = case.get("group_mean_std_without_std", case["group_mean"])
    same(normalizers.group_mean_std(rewards, use_std=False), without_std, torch.float64)
    same(normalizers.group_mean(rewards), case["group_mean"], torch.float64)
    if case["leave_one_out"] == "error":
        with pytest.raises(ValueError, match="at least 2"):
            normalizers.leave_one_out(rewards)
    else:
        same(normalizers.leave_one_out(rewards), case["leave_one_out"], torch.float64)


@PRECISIONS
@pytest.mark.parametrize("case", cases("kl"))
def test_kl_estimators(case, dtype):
    same(kl.estimate(case["kind"], *tensors(case, dtype, "logp", "ref_logp")), case["kl"], dtype)


@PRECISIONS
@pytest.mark.parametrize("case", cases("tis"))
def test_truncated_importance_weights(case, dtype):
    weights = corrections.tis(*tensors(case, dtype, "train_old_logp", "rollout_logp"), case["clip"], case["clip_low"])
    same(weights, case["weights"], dtype)


@PRECISIONS
@pytest.mark.parametrize("case", cases("gae"))
def test_generalized_advantage_estimation(case, dtype):
    inputs = tensors(case, dtype, "rewards", "values", "mask")
    made, returns = advantages.gae(*inputs, case["gamma"], case["lambd"])
    same(made, case["advantages"], dtype)
    same(returns, case["returns"], dtype)


@PRECISIONS
@pytest.mark.parametrize("case", cases("reinforce_plus_plus_returns"))
def test_reinforce_plus_plus_returns(case, dtype):
    inputs = tensors(case, dtype, "reward", "kl", "mask")
    returns = advantages.reinforce_plus_plus_returns(*inputs, case["kl_coef"], case["gamma"])
    same(returns, case["returns"], dtype)


@PRECISIONS
@pytest.mark.parametrize("case", cases("whiten"))
def test_whitening(case, dtype):
    same(advantages.whiten(*tensors(case, dtype, "advantages", "mask")), case["whitened"], dtype)


@PRECISIONS
@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_loss(case, dtype):
    token = losses.value(*tensors(case, dtype, "values", "old_values", "returns"))
    same(token.loss, case["loss"], dtype)
    same(token.clipped, case["clipped"], dtype)

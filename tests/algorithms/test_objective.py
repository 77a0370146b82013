"""The loss of a micro-batch: what it is made of, and that no way of cutting the batch changes it."""

import math

import pytest
import torch

from relax.algorithms import corrections, losses, reduce, registry
from relax.algorithms.objective import Denominators, objective, value_objective
from relax.algorithms.proximal import proximal_source
from relax.config.options import Options

ROWS, COLUMNS = 8, 6


def recorded(seed=0, dtype=torch.float64):
    """Unequal lengths, one empty response, one abstaining sample, NaN wherever nothing may look."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(ROWS, COLUMNS, generator=generator, dtype=dtype)  # noqa: E731
    lengths = torch.tensor([6, 3, 0, 5, 1, 6, 4, 2])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).to(torch.uint8)
    mask[0, 2] = 0
    rewards = draw()[:, 0]
    rewards[5], mask[5] = math.nan, 0
    behaviour = -draw().abs()
    batch = {
        "behaviour_logprobs": behaviour,
        "proximal_logprobs": behaviour + 0.1 * draw(),
        "reference_logprobs": behaviour + 0.5 * draw(),
        "advantages": draw(),
        "values": draw(),
        "returns": draw(),
    }
    current, entropy = behaviour + 0.4 * draw(), draw().abs()
    batch = {name: torch.where(mask.bool(), x, math.nan) for name, x in batch.items()}
    batch |= {"loss_mask": mask, "rewards": rewards}
    return torch.where(mask.bool(), current, math.inf), entropy, batch


def denominators(batch):
    return Denominators.of(batch["loss_mask"].numpy(), batch["rewards"].numpy())


def run(spec, options, current, entropy, batch, over):
    current, entropy = current.clone().requires_grad_(), entropy.clone().requires_grad_()
    made = objective(spec, options, current, entropy, batch, over)
    return made, torch.autograd.grad(made.loss, [current, entropy], allow_unused=True)


def part(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


FULL = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "use_unbiased_kl": True,
    "entropy_coef": 0.02,
    "use_opsm": True,
    "opsm_delta": 0.05,
}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("extra", [{}, {"use_tis": True}, {"use_tis": True, "tis_mode": "icepop", "tis_clip_low": 0.9}])
@pytest.mark.parametrize("name", [n for n in registry.names() if n != "m2po"])
def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(name, extra, per_token):
    spec, options = registry.get(name), Options(**FULL, **extra, calculate_per_token_loss=per_token)
    current, entropy, batch = recorded()
    over = denominators(batch)
    whole, gradients = run(spec, options, current, entropy, batch, over)
    assert whole.loss.isfinite() and all(g.isfinite().all() for g in gradients)
    for ranks in (1, 2, 4):
        for size in (1, 2, 8):
            parts, grads, sums = [], [], {}
            for rank_rows in torch.arange(ROWS).chunk(ranks):
                for rows in rank_rows.split(size):
                    made, grad = run(spec, options, current[rows], entropy[rows], part(batch, rows), over)
                    parts.append(made.loss)
                    grads.append(grad)
                    for metric, (total, count) in made.metrics.items():
                        before = sums.get(metric, (0, 0))
                        sums[metric] = (before[0] + total, before[1] + count)
            torch.testing.assert_close(sum(parts), whole.loss, rtol=0, atol=1e-12)
            for i, expected in enumerate(gradients):
                torch.testing.assert_close(torch.cat([g[i] for g in grads]), expected, rtol=0, atol=1e-12)
            for metric, (total, count) in whole.metrics.items():
                torch.testing.assert_close(sums[metric][0] / sums[metric][1], total / count)


def test_m2po_with_its_band_held_fixed_does_not_depend_on_how_the_batch_is_cut():
    current, entropy, batch = recorded()
    over, options = denominators(batch), Options(m2po_kl2_budget=0.02)
    whole, (gradient, _) = run(registry.get("m2po"), options, current, entropy, batch, over)
    count = whole.metrics["train/m2po_eps_low"][1]
    low, high = (float(whole.metrics[f"train/m2po_eps_{side}"][0]) for side in ("low", "high"))
    assert count == over.samples and low < 1
    fixed = Options(eps_clip=low, eps_clip_high=high)
    parts = [
        run(registry.get("grpo"), fixed, current[rows], entropy[rows], part(batch, rows), over)
        for rows in torch.arange(ROWS).split(2)
    ]
    torch.testing.assert_close(sum(made.loss for made, _ in parts), whole.loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([grad[0] for _, grad in parts]), gradient, rtol=0, atol=1e-12)


def test_objective_is_the_token_loss_times_weights_less_entropy_plus_kl():
    options = Options(**FULL, use_tis=True, tis_clip=1.1)
    current, entropy, batch = recorded()
    made, _ = run(registry.get("grpo"), options, current, entropy, batch, denominators(batch))
    total = 0.0
    for b in range(ROWS):
        tokens = [t for t in range(COLUMNS) if batch["loss_mask"][b, t]]
        if not tokens:
            continue
        drift = sum(float(batch["proximal_logprobs"][b, t] - current[b, t]) for t in tokens) / len(tokens)
        row = 0.0
        for t in tokens:
            now, old = float(current[b, t]), float(batch["proximal_logprobs"][b, t])
            a, ratio = float(batch["advantages"][b, t]), math.exp(now - old)
            weight = min(math.exp(old - float(batch["behaviour_logprobs"][b, t])), 1.1)
            kept = 0 if a < 0 and drift > 0.05 else 1
            d = now - float(batch["reference_logprobs"][b, t])
            policy = max(-ratio * a, -min(max(ratio, 0.8), 1.2) * a) * weight * kept
            row += policy - 0.02 * float(entropy[b, t]) + 0.3 * ratio * (math.exp(-d) - 1 + d)
        total += row / len(tokens)
    assert made.loss.item() == pytest.approx(total / 7)


def test_abstaining_sample_leaves_the_per_sample_mean_and_an_empty_response_stays():
    _, _, batch = recorded()
    assert denominators(batch) == Denominators(tokens=int(batch["loss_mask"].sum()), samples=ROWS - 1)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", registry.names())
def test_batch_without_valid_tokens_has_zero_loss_and_gradient(name, per_token):
    options = Options(**FULL, use_tis=True, calculate_per_token_loss=per_token)
    current, entropy, batch = recorded()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    made, gradients = run(registry.get(name), options, current * math.nan, entropy, batch, Denominators(0, 0))
    assert made.loss == 0 and all(g is None or not g.any() for g in gradients)


def test_old_log_probs_come_from_where_the_options_say():
    grpo, rloo = registry.get("grpo"), registry.get("rloo")
    assert proximal_source(grpo, Options()) == "recomputed"
    assert proximal_source(grpo, Options(use_rollout_logprobs=True)) == "behaviour"
    assert proximal_source(grpo, Options(true_on_policy_mode=True)) == "current"
    assert proximal_source(rloo, Options()) == "none"
    assert proximal_source(rloo, Options(use_kl_loss=True)) == "none"
    for option in ({"use_tis": True}, {"use_opsm": True}, {"use_kl_loss": True, "use_unbiased_kl": True}):
        assert proximal_source(rloo, Options(**option)) == "recomputed"


def test_true_on_policy_mode_has_ratio_one_and_the_reinforce_gradient():
    current, entropy, batch = recorded()
    del batch["proximal_logprobs"]
    options = Options(true_on_policy_mode=True, calculate_per_token_loss=True)
    made, (gradient, _) = run(registry.get("grpo"), options, current, entropy, batch, denominators(batch))
    mask = batch["loss_mask"].bool()
    torch.testing.assert_close(gradient[mask], -batch["advantages"][mask] / mask.sum())
    assert made.metrics["train/ppo_kl"][0] == 0 and made.metrics["train/pg_clipfrac"][0] == 0


def test_missing_log_probs_are_named():
    current, entropy, batch = recorded()
    del batch["proximal_logprobs"]
    with pytest.raises(KeyError, match="proximal_logprobs"):
        run(registry.get("grpo"), Options(), current, entropy, batch, denominators(batch))


ALWAYS = {
    "loss",
    "pg_loss",
    "entropy",
    "pg_clipfrac",
    "train_rollout_logprob_abs_diff",
    "mismatch_kl",
    "mismatch_k3_kl",
}
M2PO = {"ppo_kl_m2_before", "ppo_kl_m2_after", "m2po_eps_low", "m2po_eps_high"}


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("grpo", {}, {"ppo_kl"}),
        ("gspo", {"use_tis": True}, {"ppo_kl", "tis", "tis_weight", "tis_clipfrac", "tis_abs"}),
        ("cispo", {"use_opsm": True}, {"ppo_kl", "opsm_clipfrac"}),
        ("sapo", {"use_kl_loss": True}, {"ppo_kl", "kl_loss"}),
        ("m2po", {"use_rollout_logprobs": True}, {"ppo_kl"} | M2PO),
        ("rloo", {}, set()),
    ],
)
def test_metrics_belong_to_the_algorithm_and_its_options(name, options, more):
    current, entropy, batch = recorded()
    made, _ = run(registry.get(name), Options(**options), current, entropy, batch, denominators(batch))
    assert {metric.removeprefix("train/") for metric in made.metrics} == ALWAYS | more
    assert not any(x.requires_grad for pair in made.metrics.values() for x in pair)


def test_metrics_are_means_over_valid_tokens_in_the_runs_reduction():
    current, entropy, batch = recorded()
    mask, over = batch["loss_mask"], denominators(batch)
    for per_token in (False, True):
        options = Options(calculate_per_token_loss=per_token)
        made, _ = run(registry.get("grpo"), options, current, entropy, batch, over)
        mean = {name: total / count for name, (total, count) in made.metrics.items()}
        average = (
            (lambda x: reduce.per_token(x, mask)) if per_token else (lambda x: reduce.per_sample(x, mask, over.samples))
        )
        torch.testing.assert_close(mean["train/loss"], made.loss.detach())
        torch.testing.assert_close(mean["train/entropy"], average(entropy))
        torch.testing.assert_close(mean["train/ppo_kl"], average(batch["proximal_logprobs"] - current))
        apart = (batch["proximal_logprobs"] - batch["behaviour_logprobs"]).abs()
        torch.testing.assert_close(mean["train/train_rollout_logprob_abs_diff"], average(apart))
        clipped = losses.ppo_clip(current, batch["proximal_logprobs"], batch["advantages"]).clipped
        torch.testing.assert_close(mean["train/pg_clipfrac"], average(clipped))


def test_clip_fraction_counts_before_the_weights():
    current, entropy, batch = recorded()
    over, spec = denominators(batch), registry.get("grpo")
    plain, _ = run(spec, Options(), current, entropy, batch, over)
    options = Options(use_tis=True, tis_mode="icepop", tis_clip=1e-6)
    weighted, _ = run(spec, options, current, entropy, batch, over)
    assert weighted.loss == 0 and weighted.metrics["train/tis_clipfrac"][0] > 0
    assert torch.equal(weighted.metrics["train/pg_clipfrac"][0], plain.metrics["train/pg_clipfrac"][0])


def test_rejected_token_with_an_infinite_mismatch_does_not_poison_the_loss():
    current, entropy, batch = recorded()
    batch["behaviour_logprobs"][0, 0] = -math.inf
    options = Options(use_tis=True, tis_mode="icepop")
    made, gradients = run(registry.get("grpo"), options, current, entropy, batch, denominators(batch))
    assert made.loss.isfinite() and gradients[0].isfinite().all()


def test_m2po_scalars_weigh_by_tokens_or_add_up_over_samples():
    current, entropy, batch = recorded()
    over = denominators(batch)
    for per_token, weight, count in ((True, over.tokens, over.tokens), (False, 1, over.samples)):
        options = Options(m2po_kl2_budget=0.02, calculate_per_token_loss=per_token)
        made, _ = run(registry.get("m2po"), options, current, entropy, batch, over)
        total, seen = made.metrics["train/m2po_eps_low"]
        assert float(total) == pytest.approx(0.3 * weight) and seen == count


def test_value_objective_is_the_reduced_clipped_error():
    _, entropy, batch = recorded()
    mask, over = batch["loss_mask"], denominators(batch)
    values = entropy.clone().requires_grad_()
    made = value_objective(Options(value_clip=0.1), values, batch, over)
    token = losses.value(values, batch["values"], batch["returns"], 0.1)
    torch.testing.assert_close(made.loss, reduce.per_sample(token.loss, mask, over.samples))
    made.loss.backward()
    assert values.grad.isfinite().all() and not values.grad[~mask.bool()].any()
    assert set(made.metrics) == {"train/value_loss", "train/value_clipfrac"}


def test_tis_weight_compares_proximal_with_behaviour():
    current, entropy, batch = recorded()
    options = Options(use_tis=True, tis_clip=1.05, calculate_per_token_loss=True)
    made, _ = run(registry.get("rloo"), options, current, entropy, batch, denominators(batch))
    weights = corrections.tis(batch["proximal_logprobs"], batch["behaviour_logprobs"], clip=1.05)
    expected = reduce.per_token(-batch["advantages"] * current * weights, batch["loss_mask"])
    torch.testing.assert_close(made.loss.detach(), expected)


@pytest.mark.parametrize("mode", ["truncate", "icepop"])
def test_weights_are_reported_before_and_after_their_bounds(mode):
    current, entropy, batch = recorded()
    low, high = 0.95, 1.05
    bounds = {"tis_clip_low": low, "tis_clip": high, "tis_mode": mode}
    options = Options(use_tis=True, **bounds, calculate_per_token_loss=True)
    made, _ = run(registry.get("grpo"), options, current, entropy, batch, denominators(batch))
    mask = batch["loss_mask"].bool()
    ratios = (batch["proximal_logprobs"] - batch["behaviour_logprobs"])[mask].exp().tolist()
    outside = [r for r in ratios if not low <= r <= high]
    assert {r > high for r in outside} == {True, False}, "both bounds must act"
    bounded = [min(max(r, low), high) if mode == "truncate" else r * (low <= r <= high) for r in ratios]
    expected = {
        "tis": sum(ratios),
        "tis_weight": sum(bounded),
        "tis_clipfrac": len(outside),
        "tis_abs": sum(abs(r - 1) for r in ratios),
    }
    for name, total in expected.items():
        assert float(made.metrics[f"train/{name}"][0]) == pytest.approx(total), name
        assert made.metrics[f"train/{name}"][1] == len(ratios)


def test_m2po_reports_the_second_moment_of_the_policy_from_the_behaviour():
    current, entropy, batch = recorded()
    options = Options(use_rollout_logprobs=True, m2po_kl2_budget=0.02, calculate_per_token_loss=True)
    made, _ = run(registry.get("m2po"), options, current, entropy, batch, denominators(batch))
    mask = batch["loss_mask"].bool()
    d, advantage = (current - batch["behaviour_logprobs"])[mask], batch["advantages"][mask]
    harmful = ((advantage > 0) & (d > 0)) | ((advantage < 0) & (d < 0))
    before, after = (made.metrics[f"train/ppo_kl_m2_{when}"] for when in ("before", "after"))
    assert float(before[0] / before[1]) == pytest.approx(float(d[harmful].square().mean()))
    assert float(after[0] / after[1]) < 0.02 < float(before[0] / before[1])

"""The hooks: what they are given, what is done with what they return, and how a bad one is told."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from relax.algorithms import advantages, contracts, corrections, hooks, losses, normalizers, registry, signal
from relax.algorithms.hooks import ADVANTAGE, HOOKS, LOSS, REWARD_POST_PROCESS, TIS, HookError
from relax.algorithms.objective import Denominators, objective
from relax.algorithms.proximal import proximal_source
from relax.config.options import Options

REWARDS = np.array([1.0, 0.0, 0.5, 2.0, math.nan, 3.0])
GROUPS = np.array([7, 3, 7, 3, 7, 3])
LENS = np.array([2, 3, 0, 1, 2, 1], np.int32)
MASK = np.repeat(np.isfinite(REWARDS), LENS).astype(np.uint8)
COLUMNS = 3


def here(function):
    return f"{__name__}:{function.__name__}"


def chosen(hook, function, **more):
    return Options(**{hook.option: here(function)}, **more)


def made_by(name, options, **more):
    return signal.batch_advantages(registry.get(name), options, REWARDS, GROUPS, LENS, MASK, **more)


# --- rewards ---------------------------------------------------------------------------------------------------------


def centred_over_the_batch(rewards, group_ids, options):
    assert group_ids.tolist() == GROUPS.tolist()
    return rewards - np.nanmean(rewards) + options.seed


def test_reward_hook_takes_the_place_of_the_normalizer():
    made = made_by("grpo", chosen(REWARD_POST_PROCESS, centred_over_the_batch, seed=5))
    expected = np.nan_to_num(REWARDS - np.nanmean(REWARDS) + 5)
    np.testing.assert_allclose(made.scores, expected)
    np.testing.assert_allclose(made.advantages, np.repeat(expected, LENS) * MASK, rtol=1e-6)


def spoils_its_arguments(rewards, group_ids, options):
    rewards[:], group_ids[:] = 0, 0
    return rewards


def test_reward_hook_cannot_change_the_rewards_that_are_reported():
    before = REWARDS.copy(), GROUPS.copy()
    made_by("rloo", chosen(REWARD_POST_PROCESS, spoils_its_arguments))
    np.testing.assert_array_equal(REWARDS, before[0])
    np.testing.assert_array_equal(GROUPS, before[1])


def test_group_with_too_few_rewards_is_refused_before_the_hook_sees_it():
    with pytest.raises(ValueError, match=r"group 7 .*too_few_rewards"):
        signal.batch_advantages(
            registry.get("rloo"),
            chosen(REWARD_POST_PROCESS, centred_over_the_batch),
            np.array([1.0, math.nan]),
            np.array([7, 7]),
            np.array([1, 1]),
            np.array([1, 0]),
        )


def too_short(rewards, group_ids, options):
    return rewards[:-1]


def not_finite(rewards, group_ids, options):
    return np.where(rewards == 2, np.inf, rewards)


@pytest.mark.parametrize(
    ("function", "told"),
    [(too_short, r"shape \(5,\) for 6 samples"), (not_finite, "sample 3, of group 3 and reward 2.0, is inf")],
)
def test_unusable_scores_name_the_hook_and_the_sample(function, told):
    with pytest.raises(HookError, match=f"--custom-reward-post-process-path {__name__}:{function.__name__}: .*{told}"):
        made_by("grpo", chosen(REWARD_POST_PROCESS, function))


# --- advantages ------------------------------------------------------------------------------------------------------


def halved(scores, mask, options, **rest):
    assert scores.dtype == torch.float64 and mask.dtype == torch.bool and mask.shape == (6, COLUMNS)
    assert rest["kl"] is None and rest["values"] is None and rest["group_ids"].tolist() == GROUPS.tolist()
    made = (scores / 2).unsqueeze(1).expand(mask.shape).clone()
    made[~mask] = math.nan
    return made


def test_advantage_hook_gets_normalized_scores_and_counts_only_inside_the_mask():
    plain, made = made_by("grpo", Options()), made_by("grpo", chosen(ADVANTAGE, halved))
    np.testing.assert_allclose(made.advantages, plain.advantages / 2, rtol=1e-6)
    np.testing.assert_array_equal(made.scores, plain.scores)


def test_whitening_follows_the_advantage_hook():
    made = made_by("grpo", chosen(ADVANTAGE, halved, normalize_advantages=True))
    inside = made.advantages[MASK == 1]
    assert inside.mean() == pytest.approx(0, abs=1e-6) and inside.std(ddof=1) == pytest.approx(1, abs=1e-6)


def own_gae(scores, mask, values, options, **rest):
    rewards = advantages.last_token_rewards(scores, mask)
    return advantages.gae(rewards, values, mask, options.gamma, options.lambd)


def flat(seed):
    return np.random.default_rng(seed).normal(size=LENS.sum()).astype(np.float32)


def test_advantage_hook_of_ppo_gets_values_and_returns_returns():
    numbers = {"gamma": 0.9, "lambd": 0.8}
    plain = made_by("ppo", Options(**numbers), values=flat(0))
    made = made_by("ppo", chosen(ADVANTAGE, own_gae, **numbers), values=flat(0))
    np.testing.assert_allclose(made.advantages, plain.advantages, rtol=1e-6)
    np.testing.assert_allclose(made.returns, plain.returns, rtol=1e-6)
    assert "rollout/returns" in made.metrics


def kl_only(scores, mask, kl, options, **rest):
    return kl


def test_advantage_hook_of_reinforce_plus_plus_gets_the_kl():
    behaviour, reference = flat(0), flat(1)
    options = chosen(ADVANTAGE, kl_only)
    made = made_by("reinforce_plus_plus", options, behaviour_logprobs=behaviour, reference_logprobs=reference)
    np.testing.assert_allclose(made.advantages, (behaviour - reference) * MASK, rtol=1e-5)
    assert "rollout/returns" not in made.metrics


def scores_only(scores, mask, options, **rest):
    return scores


def infinite(scores, mask, options, **rest):
    return torch.full(mask.shape, math.inf)


@pytest.mark.parametrize(
    ("name", "function", "told"),
    [
        ("grpo", scores_only, r"advantages of \(6,\); it must be a tensor of \(6, 3\)"),
        ("grpo", infinite, "advantages of sample 0, token 0, is inf"),
        ("ppo", kl_only, "returned 1 tensors; ppo needs advantages and returns"),
    ],
)
def test_unusable_advantages_name_the_hook_and_the_place(name, function, told):
    with pytest.raises(HookError, match=f"--custom-advantage-path {__name__}:{function.__name__}: .*{told}"):
        made_by(name, chosen(ADVANTAGE, function), values=flat(0))


@pytest.mark.parametrize(
    ("hook", "function"), [(REWARD_POST_PROCESS, centred_over_the_batch), (ADVANTAGE, halved)], ids=["reward", "token"]
)
def test_rloo_metrics_are_absent_where_a_hook_replaces_the_signal(hook, function):
    assert any("/rloo/" in name for name in made_by("rloo", Options()).metrics)
    assert set(made_by("rloo", chosen(hook, function)).metrics) == {"rollout/advantages"}


# --- losses ----------------------------------------------------------------------------------------------------------


def micro():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(4, 5, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.arange(5) < torch.tensor([5, 2, 0, 3])[:, None]
    behaviour = -draw().abs()
    batch = {
        "behaviour_logprobs": behaviour,
        "proximal_logprobs": behaviour + 0.2 * draw(),
        "advantages": draw(),
    }
    current = behaviour + 0.4 * draw()
    batch = {name: torch.where(mask, x, math.nan) for name, x in batch.items()}
    return torch.where(mask, current, math.nan), batch | {"loss_mask": mask, "rewards": draw()[:, 0]}


def run(name, options):
    current, batch = micro()
    current.requires_grad_()
    over = Denominators.of(batch["loss_mask"].numpy(), batch["rewards"].numpy())
    made = objective(registry.get(name), options, current, torch.zeros_like(current), batch, over)
    (gradient,) = torch.autograd.grad(made.loss, current)
    return made, gradient


def own_clip(logp, old_logp, A, mask, options):
    token = losses.ppo_clip(logp, old_logp, A, options.eps_clip)
    loss = torch.where(mask, token.loss, math.nan)
    return losses.TokenLoss(loss, token.clipped, {"largest": logp.max()})


def test_loss_hook_takes_the_place_of_the_policy_loss_and_counts_only_inside_the_mask():
    plain, expected = run("grpo", Options(eps_clip=0.1))
    made, gradient = run("grpo", chosen(LOSS, own_clip, eps_clip=0.1))
    torch.testing.assert_close(made.loss, plain.loss)
    torch.testing.assert_close(gradient, expected)
    assert set(made.metrics) - set(plain.metrics) == {"train/largest"}
    assert torch.equal(made.metrics["train/pg_clipfrac"][0], plain.metrics["train/pg_clipfrac"][0])
    assert not any(x.requires_grad for pair in made.metrics.values() for x in pair)


def test_loss_hook_gets_old_log_probs_also_where_the_algorithm_has_no_ratio():
    options = chosen(LOSS, own_clip, calculate_per_token_loss=True)
    assert proximal_source(registry.get("rloo"), Options()) == "none"
    assert proximal_source(registry.get("rloo"), options) == "recomputed"
    made, _ = run("rloo", options)
    plain, _ = run("grpo", Options(calculate_per_token_loss=True))
    torch.testing.assert_close(made.loss, plain.loss)
    assert "train/ppo_kl" in made.metrics


def loss_of_m2po_is_gone(logp, old_logp, A, mask, options):
    return losses.rloo(logp, A)


def test_metrics_of_a_loss_that_is_replaced_are_absent():
    assert not any("m2" in name for name in run("m2po", chosen(LOSS, loss_of_m2po_is_gone))[0].metrics)


def bare(logp, old_logp, A, mask, options):
    return -A * logp


def detached(logp, old_logp, A, mask, options):
    return losses.rloo(logp.detach(), A)


def nan_inside(logp, old_logp, A, mask, options):
    return losses.TokenLoss(logp * math.nan, torch.zeros_like(logp))


def reduced(logp, old_logp, A, mask, options):
    return losses.TokenLoss((A * logp).mean(), torch.zeros_like(logp))


def number(logp, old_logp, A, mask, options):
    return losses.TokenLoss(A * logp, torch.zeros_like(logp), {"x": 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (bare, "returned a Tensor; it must be a losses.TokenLoss"),
        (detached, "has no gradient"),
        (nan_inside, "`loss` of row 0, token 0, is nan"),
        (reduced, r"`loss` of \(\); it must be a tensor of \(4, 5\)"),
        (number, "scalar 'x' is 1.0"),
    ],
)
def test_unusable_loss_names_the_hook_and_the_place(function, told):
    with pytest.raises(HookError, match=f"--custom-loss-path {__name__}:{function.__name__}: .*{told}"):
        run("grpo", chosen(LOSS, function))


# --- weights ---------------------------------------------------------------------------------------------------------


def square_root(old_logp, rollout_logp, mask, options):
    weight = corrections.mismatch_ratio(old_logp, rollout_logp).sqrt().clamp(max=options.tis_clip)
    return torch.where(mask, weight, math.nan)


def test_tis_hook_takes_the_place_of_the_weight():
    options = chosen(TIS, square_root, use_tis=True, tis_clip=1.05, calculate_per_token_loss=True)
    made, gradient = run("rloo", options)
    _, batch = micro()
    mask, old, behaviour = batch["loss_mask"], batch["proximal_logprobs"], batch["behaviour_logprobs"]
    weight = ((old - behaviour) / 2).exp().clamp(max=1.05)
    expected = torch.where(mask, -batch["advantages"] * weight / mask.sum(), 0.0)
    torch.testing.assert_close(gradient, expected)
    share = (weight != (old - behaviour).exp())[mask].sum() / mask.sum()
    total, count = made.metrics["train/tis_clipfrac"]
    assert float(total / count) == pytest.approx(float(share))


def per_row(old_logp, rollout_logp, mask, options):
    return old_logp.sum(1)


def test_unusable_weight_names_the_hook():
    with pytest.raises(HookError, match=f"--custom-tis-path {__name__}:per_row: returned a weight of"):
        run("grpo", chosen(TIS, per_row, use_tis=True))


# --- rules -----------------------------------------------------------------------------------------------------------


def refused(**given):
    return {violation.option for violation in contracts.violations(Options(**given))}


def test_options_that_a_hook_takes_the_place_of_are_refused():
    post = {"custom_reward_post_process_path": "my:hook"}
    assert refused(**post) == set()
    assert refused(**post, disable_rewards_normalization=True) == {"--disable-rewards-normalization"}
    assert refused(**post, disable_grpo_std_normalization=True) == {"--disable-grpo-std-normalization"}
    assert refused(custom_tis_path="my:hook") == {"--custom-tis-path"}
    assert refused(custom_tis_path="my:hook", use_tis=True, tis_clip=3.0) == set()
    assert refused(custom_tis_path="my:hook", use_tis=True, tis_mode="icepop") == {"--tis-mode"}


def test_numbers_that_a_hook_may_read_are_not_refused():
    assert refused(custom_loss_path="my:hook", sapo_tau_pos=2.0, eps_clip_c=3.0) == set()
    assert refused(custom_advantage_path="my:hook", gamma=0.9, lambd=0.9) == set()
    assert refused(custom_advantage_path="my:hook", kl_coef=0.1) == {"--kl-coef"}
    rloo = {"advantage_estimator": "rloo", "calculate_per_token_loss": True, "use_rollout_logprobs": True}
    assert refused(**rloo) == {"--use-rollout-logprobs"}
    assert refused(**rloo, custom_loss_path="my:hook") == set()


def test_warnings_know_of_hooks():
    assert any("ratio is 1" in line for line in contracts.warnings(Options()))
    assert not contracts.warnings(Options(custom_loss_path="my:hook"))
    one = {"n_samples_per_prompt": 1, "use_rollout_logprobs": True}
    assert contracts.warnings(Options(**one))
    assert not contracts.warnings(Options(**one, custom_reward_post_process_path="my:hook"))


# --- before the start ------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module where the child of the check and this process find it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


def test_all_hooks_are_checked_in_one_child_and_usable_ones_pass(module):
    module(
        "hooks_good",
        "print('a module may print')\n"
        "import atexit; atexit.register(print, 'also at its end')\n"
        "def keeps(rewards, **rest): ...\n"
        "def rewards(rewards, group_ids, options): ...\n"
        "def advantage(scores, **rest): ...\n"
        "def loss(logp, old_logp, A, mask, options, more=1): ...\n"
        "class Weight:\n"
        "    def __call__(self, old_logp, rollout_logp, mask, options): ...\n"
        "weight = Weight()\n",
    )
    functions = ("keeps", "rewards", "advantage", "loss", "weight")
    options = Options(**{h.option: f"hooks_good:{f}" for h, f in zip(HOOKS, functions, strict=True)})
    assert hooks.check(options, {"advantages", "actor"}) == []
    assert "hooks_good" not in sys.modules


def test_each_unusable_hook_says_what_is_missing(module):
    module(
        "hooks_bad",
        "def reward(rewards, options): ...\nasync def advantage(**rest): ...\nweight = 3\n",
    )
    options = Options(
        custom_reward_post_process_path="hooks_bad:reward",
        custom_advantage_path="hooks_bad:advantage",
        custom_loss_path="hooks_bad:los",
        custom_tis_path="hooks_bad:weight",
    )
    found = {violation.option: violation for violation in hooks.check(options, {"advantages", "actor"})}
    told = {
        "--custom-reward-post-process-path": "cannot be called as reward(rewards=..., group_ids=..., options=...)",
        "--custom-advantage-path": "function 'advantage' of module 'hooks_bad' is async",
        "--custom-loss-path": "module 'hooks_bad' has no function 'los'",
        "--custom-tis-path": "'weight' of module 'hooks_bad' is a int, not a function",
    }
    assert found.keys() == told.keys()
    for option, words in told.items():
        assert words in found[option].problem, found[option].problem
        assert "module:function" in found[option].fix


@pytest.mark.parametrize(
    ("text", "path", "told"),
    [
        ("", "no_such_module:f", "there is no module 'no_such_module'"),
        ("", "hooks_one.inner:f", "there is no module 'hooks_one.inner'"),
        ("import not_installed_here", "hooks_one:f", "module 'hooks_one' imports 'not_installed_here'"),
        ("1 / 0", "hooks_one:f", "module 'hooks_one' cannot be imported: ZeroDivisionError: division by zero"),
        ("import os; print('its last words'); os._exit(3)", "hooks_one:f", "its process ended during the import"),
        ("", "hooks_one.f", "'hooks_one.f' is not of the form module:function"),
        ("", "hooks one:f", "is not of the form module:function"),
    ],
)
def test_module_that_cannot_be_imported_says_why(module, text, path, told):
    module("hooks_one", text)
    (found,) = hooks.check(Options(custom_loss_path=path), {"actor"})
    assert found.option == "--custom-loss-path" and found.value == path and told in found.problem, found.problem


def test_a_node_checks_the_hooks_of_its_own_services_only():
    options = Options(custom_loss_path="no_such_module:f", custom_advantage_path="no_such_module:g")
    assert [v.option for v in hooks.check(options, {"actor"})] == ["--custom-loss-path"]
    assert [v.option for v in hooks.check(options, {"advantages", "rollout"})] == ["--custom-advantage-path"]
    assert hooks.check(options, {"controller", "rollout", "reward"}) == []


def test_an_import_that_never_ends_is_given_up(module, monkeypatch):
    module("hooks_slow", "import threading; threading.Event().wait()")
    monkeypatch.setattr(hooks, "_IMPORT_SECONDS", 2.0)
    (found,) = hooks.check(Options(custom_loss_path="hooks_slow:f"), {"actor"})
    assert found.problem == "not imported within 2 s"


def test_documented_arguments_are_those_of_the_calls():
    page = hooks.__doc__ or ""
    for hook in HOOKS:
        assert f"f({', '.join(hook.arguments)}) -> " in page


def test_hooks_import_no_torch():
    code = "import json, sys, relax.algorithms.hooks; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) is False


def test_normalizers_may_be_called_by_a_hook():
    made = made_by("grpo", chosen(REWARD_POST_PROCESS, same_as_grpo))
    np.testing.assert_allclose(made.scores, made_by("grpo", Options()).scores)


def same_as_grpo(rewards, group_ids, options):
    scores = np.full(len(rewards), math.nan)
    for group in np.unique(group_ids):
        members = np.flatnonzero((group_ids == group) & np.isfinite(rewards))
        scores[members] = normalizers.group_mean_std(rewards[members]).numpy()
    return scores

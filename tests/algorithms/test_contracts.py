"""Every line of every contract, broken one at a time and all together; and options that cannot act."""

import subprocess
import sys

import pytest

from relax.algorithms import contracts, registry
from relax.config.options import Options

LEGAL = {
    "grpo": {},
    "gspo": {"eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"eps_clip_high": 10, "use_tis": True},
    "sapo": {"sapo_tau_neg": 1.1},
    "m2po": {"max_staleness": 2, "use_rollout_logprobs": True},
    "rloo": {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "calculate_per_token_loss": True,
    },
    "ppo": {"lambd": 0.95, "critic_lr": 1e-5, "value_clip": 0.3, "normalize_advantages": True},
    "reinforce_plus_plus": {"normalize_advantages": True, "kl_coef": 0.01, "ref_load": "ref", "gamma": 0.99},
    "reinforce_plus_plus_baseline": {
        "normalize_advantages": True,
        "use_kl_loss": True,
        "kl_loss_type": "k2",
        "kl_loss_coef": 0.01,
        "ref_load": "ref",
    },
}

BROKEN = {
    "m2po": [
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"use_rollout_logprobs": False}, "--max-staleness"),
        ({"eps_clip": 0.2}, "--eps-clip"),
        ({"eps_clip_high": 0.3}, "--eps-clip-high"),
        ({"eps_clip_c": 3.0}, "--eps-clip-c"),
    ],
    "rloo": [
        ({"n_samples_per_prompt": 1, "global_batch_size": 4}, "--n-samples-per-prompt"),
        ({"global_batch_size": 4}, "--global-batch-size"),
        ({"num_steps_per_rollout": 2, "global_batch_size": 4}, "--num-steps-per-rollout"),
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"max_staleness": 1}, "--max-staleness"),
        ({"disable_rewards_normalization": True}, "--disable-rewards-normalization"),
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"partial_rollout": True}, "--partial-rollout"),
    ],
    "ppo": [
        ({"max_staleness": 1}, "--max-staleness"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"use_kl_loss": True, "ref_load": "ref"}, "--use-kl-loss"),
    ],
    "reinforce_plus_plus": [
        ({"normalize_advantages": False}, "--normalize-advantages"),
        ({"kl_coef": 0.0}, "--kl-coef"),
        ({"ref_load": None}, "--ref-load"),
        ({"use_kl_loss": True}, "--use-kl-loss"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
    ],
    "reinforce_plus_plus_baseline": [
        ({"n_samples_per_prompt": 1}, "--n-samples-per-prompt"),
        ({"normalize_advantages": False}, "--normalize-advantages"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"use_kl_loss": False}, "--use-kl-loss"),
        ({"kl_loss_type": "k3"}, "--kl-loss-type"),
        ({"kl_loss_coef": 0.0}, "--kl-loss-coef"),
        ({"ref_load": None}, "--ref-load"),
        ({"disable_rewards_normalization": True}, "--disable-rewards-normalization"),
        ({"custom_reward_post_process_path": "my:hook"}, "--custom-reward-post-process-path"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
    ],
}
ONE_BY_ONE = [pytest.param(n, *case, id=f"{n}{case[1]}") for n, cases in BROKEN.items() for case in cases]


def options(name, **more):
    return Options(advantage_estimator=name, **{**LEGAL[name], **more})


def refused(chosen, **more):
    return {violation.option for violation in contracts.violations(chosen, **more)}


@pytest.mark.parametrize("name", registry.names())
def test_legal_set_passes(name):
    assert contracts.violations(options(name)) == []


@pytest.mark.parametrize(("name", "broken", "flag"), ONE_BY_ONE)
def test_broken_line_is_refused_with_its_flag_and_a_fix(name, broken, flag):
    found = [v for v in contracts.violations(options(name, **broken)) if v.option == flag]
    assert len(found) == 1
    assert "--" in found[0].fix or found[0].fix.startswith("Leave it out")
    assert found[0].fix.endswith(".")


@pytest.mark.parametrize("name", BROKEN)
def test_all_lines_broken_together_are_all_named(name):
    broken: dict = {}
    for one, _ in BROKEN[name]:
        broken |= one
    if name == "rloo":
        # With one sample a prompt, 4 would be the whole rollout batch.
        broken["global_batch_size"] = 2
    expected = {flag for _, flag in BROKEN[name]}
    if name == "reinforce_plus_plus_baseline":
        # Without a KL loss there is no reference to ask for.
        expected.remove("--ref-load")
    assert expected <= refused(options(name, **broken))


@pytest.mark.parametrize(
    ("name", "given", "flag"),
    [
        ("grpo", {"kl_coef": 0.1}, "--kl-coef"),
        ("gspo", {"eps_clip_c": 3.0}, "--eps-clip-c"),
        ("cispo", {"eps_clip_c": 3.0}, "--eps-clip-c"),
        ("sapo", {"eps_clip": 0.2}, "--eps-clip"),
        ("grpo", {"sapo_tau_pos": 2.0}, "--sapo-tau-pos"),
        ("grpo", {"m2po_kl2_budget": 0.04}, "--m2po-kl2-budget"),
        ("grpo", {"gamma": 0.9}, "--gamma"),
        ("reinforce_plus_plus", {"lambd": 0.9}, "--lambd"),
        ("ppo", {"disable_grpo_std_normalization": True}, "--disable-grpo-std-normalization"),
        ("m2po", {"disable_rewards_normalization": True}, "--disable-rewards-normalization"),
        (
            "grpo",
            {"disable_rewards_normalization": True, "disable_grpo_std_normalization": True},
            "--disable-grpo-std-normalization",
        ),
        ("grpo", {"kl_loss_coef": 0.1}, "--kl-loss-coef"),
        ("grpo", {"kl_loss_type": "k3"}, "--kl-loss-type"),
        ("grpo", {"use_unbiased_kl": True}, "--use-unbiased-kl"),
        ("grpo", {"ref_load": "ref"}, "--ref-load"),
        ("grpo", {"ref_update_interval": 3}, "--ref-update-interval"),
        ("grpo", {"use_kl_loss": True}, "--ref-load"),
        ("grpo", {"value_clip": 0.2}, "--value-clip"),
        ("grpo", {"critic_lr": 1e-5}, "--critic-lr"),
        ("grpo", {"num_critic_only_steps": 2}, "--num-critic-only-steps"),
        ("grpo", {"tis_clip": 3.0}, "--tis-clip"),
        ("grpo", {"tis_mode": "icepop"}, "--tis-mode"),
        ("grpo", {"use_tis": True, "tis_clip": 0.5, "tis_clip_low": 0.6}, "--tis-clip-low"),
        ("grpo", {"opsm_delta": 0.1}, "--opsm-delta"),
        ("grpo", {"use_tis": True, "use_rollout_logprobs": True}, "--use-tis"),
        ("grpo", {"true_on_policy_mode": True, "max_staleness": 1}, "--true-on-policy-mode"),
        ("grpo", {"true_on_policy_mode": True, "num_steps_per_rollout": 2}, "--true-on-policy-mode"),
        ("grpo", {"true_on_policy_mode": True, "use_rollout_logprobs": True}, "--use-rollout-logprobs"),
        ("rloo", {"use_rollout_logprobs": True}, "--use-rollout-logprobs"),
        ("rloo", {"true_on_policy_mode": True}, "--true-on-policy-mode"),
        ("grpo", {"rollout_top_p": 0.9, "use_tis": True}, "--rollout-top-p"),
        ("grpo", {"rollout_top_k": 20, "use_rollout_logprobs": True}, "--rollout-top-k"),
        ("reinforce_plus_plus", {"rollout_top_p": 0.9}, "--rollout-top-p"),
    ],
)
def test_option_that_cannot_act_or_contradicts_another_is_refused(name, given, flag):
    assert refused(options(name, **given)) == {flag}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("grpo", {"kl_coef": 0.0, "use_tis": False, "num_critic_only_steps": 0, "eps_clip_c": None}),
        ("grpo", {"rollout_top_p": 0.9}),
        ("grpo", {"eps_clip": 0.2, "eps_clip_c": 3.0, "disable_grpo_std_normalization": True}),
        ("rloo", {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "ref"}),
        ("rloo", {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "ref", "use_unbiased_kl": True}),
        ("rloo", {"use_tis": True}),
        ("rloo", {"num_steps_per_rollout": 1}),
        ("m2po", {"normalize_advantages": True}),
        ("grpo", {"true_on_policy_mode": True, "use_tis": True}),
    ],
)
def test_switched_off_and_acting_options_pass(name, given):
    assert refused(options(name, **given)) == set()


@pytest.mark.parametrize(
    ("name", "given", "needed"),
    [
        ("grpo", {}, set()),
        ("ppo", {}, {"critic"}),
        ("reinforce_plus_plus", {}, {"reference"}),
        ("reinforce_plus_plus_baseline", {}, {"reference"}),
        ("rloo", {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "ref"}, {"reference"}),
    ],
)
def test_services_must_be_those_that_are_needed(name, given, needed):
    chosen = options(name, **given)
    assert contracts.services_needed(chosen) == needed
    usual = {"controller", "rollout", "reward", "advantages", "actor"}
    assert refused(chosen, services=usual | needed) == set()
    assert refused(chosen, services=usual) == {f"services.{role}" for role in needed}
    surplus = {"critic", "reference"} - needed
    assert refused(chosen, services=usual | {"critic", "reference"}) == {f"services.{role}" for role in surplus}


def warned(name, **given):
    return " ".join(contracts.warnings(options(name, **given)))


@pytest.mark.parametrize(
    ("name", "given", "flags"),
    [
        ("grpo", {"eps_clip_c": 3.0}, ["--eps-clip,", "--eps-clip-high", "--eps-clip-c"]),
        ("m2po", {"max_staleness": 0, "use_rollout_logprobs": False}, ["--m2po-kl2-budget", "--m2po-miniclip-low"]),
        ("grpo", {"use_opsm": True}, ["--opsm-delta"]),
        ("sapo", {}, ["--sapo-tau-pos"]),
        ("rloo", {"use_opsm": True}, ["--opsm-delta"]),
        ("grpo", {"true_on_policy_mode": True}, ["--true-on-policy-mode", "--eps-clip"]),
    ],
)
def test_ratio_that_is_always_one_is_warned_about_with_the_ways_out(name, given, flags):
    text = warned(name, **given)
    for flag in (*flags, "ratio is 1", "--use-rollout-logprobs", "--num-steps-per-rollout"):
        assert flag in text


@pytest.mark.parametrize(
    ("name", "given"),
    [("grpo", {"use_rollout_logprobs": True}), ("grpo", {"num_steps_per_rollout": 2}), ("rloo", {}), ("m2po", {})],
)
def test_ratio_that_can_move_is_not_warned_about(name, given):
    assert "ratio is 1" not in warned(name, **given)


def test_surprising_but_legal_combinations_are_warned_about():
    kl = {"use_kl_loss": True, "ref_load": "ref", "kl_loss_coef": 0.1}
    assert "every advantage is 0" in warned("grpo", n_samples_per_prompt=1)
    assert "2 batches old" in warned("grpo", max_staleness=2, no_off_policy_correction=True)
    assert "expectation 0" in warned("grpo", **kl, kl_loss_type="k1")
    assert "k2 times the ratio" in warned("grpo", **kl, kl_loss_type="k2", use_unbiased_kl=True)
    assert "measured and does not act" in warned("grpo", **{**kl, "kl_loss_coef": 0.0})
    assert "--m2po-kl2-budget 0.01 to 0.04" in warned("m2po", m2po_kl2_budget=1.0)
    assert "--use-tis" in warned("cispo", use_tis=False) and "--kl-loss-coef 0.001" in warned("cispo")


def test_unknown_algorithm_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'gspo'"):
        registry.get("gsp0")


def test_contracts_and_registry_import_no_torch():
    code = "import sys, relax.algorithms.contracts, relax.algorithms.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

"""The policy on one rank: log-probs, gradients against plain PyTorch, partition invariance, schedule, determinism."""

import numpy as np
import pytest
import torch

from relax.algorithms import registry
from relax.algorithms.objective import Denominators, objective
from relax.megatron import batches, parallel
from relax.megatron.optimizer import NonFiniteGradientError
from relax.megatron.parallel import GridError
from relax.megatron.policy import Policy
from tests.megatron import tiny


def token_mean(part):
    """Policy gradient, mean over the part's loss tokens, with an entropy term."""
    count = max(batches.num_loss_tokens(part), 1)

    def loss_fn(current, entropy, fields):
        mask = fields["loss_mask"]
        terms = torch.where(mask, -current * fields["advantages"] - 0.01 * entropy, 0.0)
        return terms.sum() / count, {"entropy": (torch.where(mask, entropy, 0.0).sum(), mask.sum())}

    return loss_fn


def by_hand(model, batch, temperature):
    """Per sample: (log-probs, entropies) of the response tokens, each row alone, from transformers' logits."""
    start, out = 0, []
    for p, r in zip(batch["prompt_lens"], batch["response_lens"], strict=True):
        tokens = torch.tensor(batch["tokens"][start : start + p + r].astype(np.int64))
        start += p + r
        logp = (model(tokens[None]).logits[0, p - 1 : p + r - 1] / temperature).log_softmax(-1)
        out.append((logp.gather(-1, tokens[p:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
    return torch.cat([a for a, _ in out]), torch.cat([b for _, b in out])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["qwen3", "llama-tied", "qwen2"])
def test_logprobs_equal_transformers_row_by_row(kind, temperature, tmp_path):
    reference = tiny.save(tmp_path, kind)
    batch = tiny.batch()
    got = Policy(tiny.options(micro_batch_size=3), tmp_path).logprobs(batch, temperature)
    with torch.no_grad():
        expected, _ = by_hand(reference, batch, temperature)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradients_equal_plain_pytorch(kind, temperature, tmp_path):
    reference = tiny.save(tmp_path, kind)
    batch = tiny.batch()
    policy = Policy(tiny.options(rollout_temperature=temperature), tmp_path)
    loss, metrics = policy.network.backward(batch, token_mean(batch))
    logp, entropy = by_hand(reference, batch, temperature)
    mask, advantages = torch.tensor(batch["loss_mask"].astype(bool)), torch.tensor(batch["advantages"])
    expected = (-logp * advantages - 0.01 * entropy)[mask].mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["entropy"] == pytest.approx((entropy[mask].sum().item(), mask.sum().item()), rel=1e-5)
    gradients = dict(policy.network.state(policy.network.gradients()))
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_loss_and_gradients_do_not_depend_on_micro_batches(size, tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    results = []
    for micro in (8, size):
        policy = Policy(tiny.options(micro_batch_size=micro), tmp_path)
        loss, metrics = policy.network.backward(batch, token_mean(batch))
        results.append((loss, metrics, dict(policy.network.state(policy.network.gradients()))))
    (loss, metrics, gradients), (loss2, metrics2, gradients2) = results
    assert loss2 == pytest.approx(loss, abs=1e-6)
    assert metrics2["entropy"] == pytest.approx(metrics["entropy"], rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients2[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo"])
@pytest.mark.parametrize("per_token", [True, False])
def test_loss_and_gradients_of_an_algorithm_do_not_depend_on_micro_batches(name, per_token, tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    spec, results = registry.get(name), []
    for size in (8, 3, 1):
        options = tiny.options(micro_batch_size=size, calculate_per_token_loss=per_token, use_rollout_logprobs=True)
        denominators = Denominators.of(batch["loss_mask"], batch["rewards"])

        def loss_fn(current, entropy, fields, options=options, denominators=denominators):
            result = objective(spec, options, current, entropy, fields, denominators)
            return result.loss, result.metrics

        policy = Policy(options, tmp_path)
        loss, metrics = policy.network.backward(batch, loss_fn)
        results.append((loss, metrics, dict(policy.network.state(policy.network.gradients()))))
    loss, metrics, gradients = results[0]
    assert metrics["train/loss"][0] / metrics["train/loss"][1] == pytest.approx(loss, abs=1e-6)
    for other, other_metrics, other_gradients in results[1:]:
        assert other == pytest.approx(loss, abs=1e-6)
        assert other_metrics.keys() == metrics.keys()
        for metric, pair in metrics.items():
            assert other_metrics[metric] == pytest.approx(pair, abs=1e-4, rel=1e-5), metric
        for tensor, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[tensor], gradient, atol=1e-6, rtol=1e-3)


def test_number_of_parameters_is_that_of_transformers(tmp_path):
    for kind in ("qwen2", "qwen3-tied"):
        model = tiny.save(tmp_path / kind, kind)
        assert Policy(tiny.options(), tmp_path / kind).network.num_parameters == model.num_parameters()


def test_a_step_changes_the_weights_that_state_and_logprobs_show(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    policy = Policy(tiny.options(), tmp_path)
    before, old = dict(policy.state()), policy.logprobs(batch)
    result = policy.train(batch, token_mean(batch))
    assert not result.skipped
    assert result.grad_norm > 0
    assert result.lr == 1e-3
    changed = [name for name, tensor in policy.state() if not torch.equal(tensor, before[name])]
    assert changed == list(before)
    assert np.abs(policy.logprobs(batch) - old).max() > 1e-4


def test_training_raises_the_probability_of_rewarded_tokens(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch() | {"advantages": np.ones_like(tiny.batch()["advantages"])}
    policy = Policy(tiny.options(lr=3e-3), tmp_path)
    mask = batch["loss_mask"].astype(bool)
    before = policy.logprobs(batch)[mask].mean()
    for _ in range(20):
        policy.train(batch, token_mean(batch))
    assert policy.logprobs(batch)[mask].mean() > before + 1


def test_two_runs_with_one_seed_are_bit_equal(tmp_path):
    tiny.save(tmp_path)
    runs = []
    for _ in range(2):
        policy = Policy(tiny.options(), tmp_path)
        losses = [policy.train(b, token_mean(b)).loss for b in (tiny.batch(seed) for seed in range(3))]
        runs.append((losses, dict(policy.state())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_a_batch_without_loss_tokens_skips_the_step_and_is_counted(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    policy = Policy(tiny.options(), tmp_path)
    before = dict(policy.state())
    result = policy.train(batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}, token_mean(batch))
    assert (result.skipped, result.loss, result.grad_norm) == (True, 0.0, 0.0)
    assert (policy.steps, policy.skipped_steps) == (1, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state())


def test_masked_micro_batches_and_losses_without_tokens_are_zero_and_finite(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    mask = batch["loss_mask"].copy()
    mask[: int(batch["response_lens"][:4].sum())] = 0
    batch["loss_mask"] = mask
    policy = Policy(tiny.options(micro_batch_size=1), tmp_path)
    result = policy.train(batch, token_mean(batch))
    assert np.isfinite([result.loss, result.grad_norm]).all()
    constant = policy.train(batch, lambda *_: (torch.zeros(()), {}))
    assert (constant.loss, constant.grad_norm) == (0.0, 0.0)


def test_a_batch_of_empty_responses_has_no_logprobs(tmp_path):
    tiny.save(tmp_path)
    empty = np.zeros(3, np.int32)
    batch = {"tokens": np.arange(6, dtype=np.int32), "prompt_lens": empty + np.int32(2), "response_lens": empty}
    assert Policy(tiny.options(), tmp_path).logprobs(batch).shape == (0,)


def test_a_nan_in_the_loss_raises_before_any_weight_changes(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    policy = Policy(tiny.options(), tmp_path)
    before = dict(policy.state())
    with pytest.raises(NonFiniteGradientError, match="step 0 is nan"):
        policy.train(batch, lambda current, *_: (current.sum() * float("nan"), {}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state())


def test_gradient_is_clipped_to_the_norm_over_all_parameters(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    policy = Policy(tiny.options(clip_grad=0.1), tmp_path)
    result = policy.train(batch, token_mean(batch))
    assert result.grad_norm > 0.1
    clipped = torch.cat([p.grad.flatten() for p in policy.optimizer.megatron.get_parameters()])
    assert clipped.norm().item() == pytest.approx(0.1, rel=1e-3)


def test_weight_decay_spares_norms_and_biases(tmp_path):
    tiny.save(tmp_path, "qwen2")
    batch = tiny.batch()
    policy = Policy(tiny.options(lr=0.1, weight_decay=0.5), tmp_path)
    before = dict(policy.state())
    policy.train(batch, lambda *_: (torch.zeros(()), {}))  # no gradient: only decay moves weights
    for name, tensor in policy.state():
        decayed = tensor.ndim == 2
        torch.testing.assert_close(tensor, before[name] * (0.95 if decayed else 1.0), msg=name)


def test_bfloat16_trains_and_exports_bfloat16(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    full = Policy(tiny.options(), tmp_path)
    half = Policy(tiny.options(train_dtype="bfloat16"), tmp_path)
    assert np.abs(half.logprobs(batch) - full.logprobs(batch)).mean() < 0.1
    losses = [half.train(batch, token_mean(batch)).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for _, tensor in half.state()} == {torch.bfloat16}


def test_total_steps_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="total_steps is 0"):
        Policy(tiny.options(), tmp_path, total_steps=0)


def test_a_process_can_leave_its_grid_and_join_another(tmp_path):
    tiny.save(tmp_path)
    batch = tiny.batch()
    first = Policy(tiny.options(), tmp_path)
    expected = first.logprobs(batch)
    parallel.shutdown()
    assert np.array_equal(Policy(tiny.options(), tmp_path).logprobs(batch), expected)


def test_a_grid_larger_than_the_processes_is_refused(tmp_path):
    tiny.save(tmp_path)
    Policy(tiny.options(), tmp_path)
    parallel.shutdown()
    with pytest.raises(GridError, match="= 2 processes hold one model, which does not divide the 1 processes started"):
        Policy(tiny.options(tensor_parallel_size=2), tmp_path)

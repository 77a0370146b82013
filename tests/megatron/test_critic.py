"""The critic on one rank: values, gradients against plain PyTorch, its head, its own rate, what it learns."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relax.algorithms.objective import Denominators, value_objective
from relax.megatron.batches import BatchError
from relax.megatron.critic import Critic
from relax.megatron.policy import Policy
from relax.services.critic_work import CriticWork
from tests.megatron import tiny


def value_batch(seed=0):
    batch = tiny.batch(seed)
    rng = np.random.default_rng(seed)
    tokens = len(batch["loss_mask"])
    return batch | {
        "values": rng.normal(0, 0.2, tokens).astype(np.float32),
        "returns": rng.normal(1, 0.5, tokens).astype(np.float32),
    }


def value_loss(part, options):
    denominators = Denominators.of(part["loss_mask"], part["rewards"])

    def loss_fn(values, fields):
        result = value_objective(options, values, fields, denominators)
        return result.loss, result.metrics

    return loss_fn


def by_hand(model, head, batch):
    """Values from transformers' trunk, each row alone: the state before a response token ends with the token before."""
    start, out = 0, []
    for p, r in zip(batch["prompt_lens"], batch["response_lens"], strict=True):
        tokens = torch.tensor(batch["tokens"][start : start + p + r].astype(np.int64))
        start += p + r
        hidden = model.model(tokens[None]).last_hidden_state[0]
        out.append((hidden @ head.T)[p - 1 : p + r - 1, 0])
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied", "qwen2"])
def test_values_are_read_where_each_token_is_predicted(kind, tmp_path):
    model, batch = tiny.save(tmp_path, kind), tiny.batch()
    critic = Critic(tiny.options(micro_batch_size=3), tmp_path)
    with torch.no_grad():
        expected = by_hand(model, dict(critic.state())["score.weight"], batch)
    got = critic.values(batch)
    assert (got.dtype, got.shape) == (np.float32, (int(batch["response_lens"].sum()),))
    assert expected.std() > 0.01
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_value_of_a_token_does_not_depend_on_it_or_on_what_follows(tmp_path):
    tiny.save(tmp_path)
    critic = Critic(tiny.options(), tmp_path)
    lens = {"prompt_lens": np.array([3], np.int32), "response_lens": np.array([4], np.int32)}
    tokens = np.arange(7, dtype=np.int32)
    other = tokens.copy()
    other[5:] = 99  # the third response token and the last
    values, changed = critic.values({"tokens": tokens} | lens), critic.values({"tokens": other} | lens)
    np.testing.assert_allclose(values[:3], changed[:3], atol=1e-7)
    assert abs(values[3] - changed[3]) > 1e-4


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_loss_and_gradients_equal_plain_pytorch(kind, per_token, tmp_path):
    model, batch = tiny.save(tmp_path, kind), value_batch()
    options = tiny.options(calculate_per_token_loss=per_token, micro_batch_size=3)
    critic = Critic(options, tmp_path)
    head = dict(critic.state())["score.weight"].requires_grad_()
    loss, metrics = critic.network.backward(batch, value_loss(batch, options))

    values = by_hand(model, head, batch)
    old, returns = torch.tensor(batch["values"]), torch.tensor(batch["returns"])
    clipped = old + (values - old).clamp(-0.2, 0.2)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    mask = torch.tensor(batch["loss_mask"].astype(bool))
    rows = torch.repeat_interleave(torch.arange(8), torch.tensor(batch["response_lens"]))
    means = [errors[mask & (rows == row)].sum() / max(int((mask & (rows == row)).sum()), 1) for row in range(8)]
    expected = errors[mask].mean() if per_token else torch.stack(means).mean()
    expected.backward()

    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["train/value_loss"][0] / metrics["train/value_loss"][1] == pytest.approx(loss, abs=1e-5)
    gradients = dict(critic.network.state(critic.network.gradients()))
    assert "lm_head.weight" not in gradients
    torch.testing.assert_close(gradients["score.weight"], head.grad, atol=1e-5, rtol=1e-4)
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(gradients[f"model.{name}"], parameter.grad, atol=1e-5, rtol=1e-4)


def test_loss_and_gradients_do_not_depend_on_micro_batches(tmp_path):
    tiny.save(tmp_path)
    batch, results = value_batch(), []
    for size in (8, 3, 1):
        options = tiny.options(micro_batch_size=size)
        critic = Critic(options, tmp_path)
        loss, metrics = critic.network.backward(batch, value_loss(batch, options))
        results.append((loss, metrics, dict(critic.network.state(critic.network.gradients()))))
    loss, metrics, gradients = results[0]
    for other, other_metrics, other_gradients in results[1:]:
        assert other == pytest.approx(loss, abs=1e-6)
        assert other_metrics.keys() == metrics.keys()
        for name, pair in metrics.items():
            assert other_metrics[name] == pytest.approx(pair, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, atol=1e-6, rtol=1e-3)


def test_it_starts_from_the_checkpoint_with_a_head_of_the_seed(tmp_path):
    tiny.save(tmp_path, "qwen3-tied")
    stored = load_file(tmp_path / "model.safetensors")
    first, same, other = (dict(Critic(tiny.options(seed=seed), tmp_path).state()) for seed in (7, 7, 8))
    assert first.keys() == stored.keys() | {"score.weight"}
    assert all(torch.equal(first[name], stored[name]) for name in stored)
    assert torch.equal(first["score.weight"], same["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])
    assert 0.5 < first["score.weight"].std().item() * 65 < 1.5


def test_number_of_parameters_counts_a_head_in_place_of_the_output_layer(tmp_path):
    for kind in ("qwen2", "qwen3-tied"):
        model = tiny.save(tmp_path / kind, kind)
        assert Critic(tiny.options(), tmp_path / kind).network.num_parameters == model.model.num_parameters() + 64


def test_training_brings_values_to_the_returns_at_the_critics_own_rate(tmp_path):
    tiny.save(tmp_path)
    options = tiny.options(lr=1e-9, critic_lr=3e-3, value_clip=100.0)
    batch, critic = value_batch(), Critic(options, tmp_path)
    mask = batch["loss_mask"].astype(bool)

    def error():
        return float(((critic.values(batch) - batch["returns"])[mask] ** 2).mean())

    before = error()
    results = [critic.train(batch, value_loss(batch, options)) for _ in range(20)]
    assert {result.lr for result in results} == {3e-3}
    assert error() < 0.2 * before


def test_a_rate_below_min_lr_is_refused_naming_the_critics_flag(tmp_path):
    options = tiny.options(lr_decay_style="linear", lr=1e-3, min_lr=1e-4, critic_lr=1e-5)
    with pytest.raises(ValueError, match=r"--min-lr 0\.0001 .* 1e-05: --lr, or the critic's --critic-lr"):
        Critic(options, tmp_path, total_steps=10)


def test_two_runs_with_one_seed_are_bit_equal(tmp_path):
    tiny.save(tmp_path)
    runs = []
    for _ in range(2):
        work = CriticWork(tiny.options(hf_checkpoint=str(tmp_path), num_steps_per_rollout=2), 6)
        metrics = [work.train(value_batch(seed)) for seed in range(3)]
        runs.append((metrics, dict(work.critic.state())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_the_work_reports_the_loss_under_the_critics_names(tmp_path):
    tiny.save(tmp_path)
    work = CriticWork(tiny.options(hf_checkpoint=str(tmp_path), num_steps_per_rollout=2), None)
    metrics = work.train(value_batch())
    assert metrics.keys() == {
        "train/value_loss",
        "train/value_clipfrac",
        "train/value_grad_norm",
        "train/value_lr",
        "train/value_step",
        "train/value_skipped_steps",
    }
    assert metrics["train/value_step"] == ("last", 2.0, 1.0)
    assert metrics["train/value_grad_norm"][2] == 2


def test_a_batch_without_loss_tokens_skips_the_step(tmp_path):
    tiny.save(tmp_path)
    batch, critic = value_batch(), Critic(tiny.options(), tmp_path)
    before = dict(critic.state())
    empty = batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}
    assert critic.train(empty, value_loss(empty, tiny.options())).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.state())
    with pytest.raises(BatchError, match="lacks loss_mask"):
        critic.train({name: batch[name] for name in ("tokens", "prompt_lens", "response_lens")}, lambda *_: None)


def test_bfloat16_trains_and_gives_float32_values(tmp_path):
    tiny.save(tmp_path)
    options = tiny.options(train_dtype="bfloat16", value_clip=100.0)
    batch = value_batch()
    full, half = Critic(tiny.options(), tmp_path), Critic(options, tmp_path)
    values = half.values(batch)
    assert values.dtype == np.float32
    assert np.abs(values - full.values(batch)).mean() < 0.02
    losses = [half.train(batch, value_loss(batch, options)).loss for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_sharded_state_for_checkpoints_holds_the_head_whole(tmp_path):
    tiny.save(tmp_path, "qwen3-tied")
    sharded = Critic(tiny.options(), tmp_path).network.model.sharded_state_dict()
    assert sharded["output_layer.weight"].global_shape == (1, 64)


def test_policy_and_critic_of_one_process_do_not_disturb_each_other(tmp_path):
    tiny.save(tmp_path, "qwen3-tied")
    batch, options = value_batch(), tiny.options()
    policy, critic = Policy(options, tmp_path), Critic(options, tmp_path)
    before = policy.logprobs(batch)
    critic.train(batch, value_loss(batch, options))
    assert np.array_equal(policy.logprobs(batch), before)

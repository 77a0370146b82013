"""The reference on one rank: log-probs of frozen weights, refreshed in place from what the actor publishes."""

import numpy as np
import pytest
import torch

from relax.megatron.checkpoint import CheckpointError
from relax.megatron.policy import Policy
from relax.megatron.reference import Reference
from relax.services.reference_work import ReferenceWork
from relax.weights.checkpoint import checkpoint_tensors
from relax.weights.store import ChunkStore
from tests.megatron import tiny


def trained(path, **changes):
    """A policy a few steps away from its checkpoint."""
    policy = Policy(tiny.options(**changes), path)
    for seed in range(3):
        policy.train(tiny.batch(seed), lambda current, entropy, fields: (current.sum() * 0.01, {}))
    return policy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_gives_the_policys_logprobs_at_the_sampling_temperature_and_holds_no_gradients(temperature, tmp_path):
    tiny.save(tmp_path)
    batch, options = tiny.batch(), tiny.options(rollout_temperature=temperature)
    reference = Reference(options, tmp_path)
    assert np.array_equal(reference.logprobs(batch), Policy(options, tmp_path).logprobs(batch))
    assert not any(p.requires_grad or hasattr(p, "main_grad") for p in reference.network.model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen2"])
def test_a_refresh_from_published_weights_is_a_fresh_load_of_them(kind, dtype, tmp_path):
    tiny.save(tmp_path / "start", kind)
    batch, options = tiny.batch(), tiny.options(train_dtype=dtype, ref_load=tmp_path / "start")
    policy = trained(tmp_path / "start", train_dtype=dtype)
    store = ChunkStore(tmp_path / "store", create=True)
    manifest = store.publish(policy.state(), run_id="test", lineage=0, version=3, step=3)
    work = ReferenceWork(options)
    before, parameters = work.logprobs(batch), [p.data_ptr() for p in work.reference.network.model.parameters()]
    work.refresh(str(store.directory), manifest.to_json().decode())

    policy.save_hf(tmp_path / "export")
    fresh = Reference(options, tmp_path / "export")
    assert np.array_equal(work.logprobs(batch), fresh.logprobs(batch))
    assert np.abs(work.logprobs(batch) - before).max() > 1e-3
    loaded = dict(work.reference.network.state())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in fresh.network.state())
    assert [p.data_ptr() for p in work.reference.network.model.parameters()] == parameters


def change(tensors, how):
    match how:
        case "missing":
            del tensors["model.norm.weight"]
        case "unknown":
            tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(1)
        case "head of a tied model":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        case "both":
            tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
        case "shape":
            tensors["model.norm.weight"] = torch.zeros(65)
    return tensors.items()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"version 4: lacks model\.norm\.weight"),
        ("unknown", r"version 4: holds model\.layers\.2\.mlp\.down_proj\.weight, which a qwen3 model has no place for"),
        ("head of a tied model", r"version 4: holds lm_head\.weight"),
        ("both", r"version 4: lacks model\.norm\.weight and holds model\.norm\.bias"),
        ("shape", r"version 4: model\.norm\.weight has shape \[65\], config\.json says \[64\]"),
    ],
)
def test_other_names_and_shapes_are_refused_and_leave_the_weights(how, message, tmp_path):
    tiny.save(tmp_path / "start", "qwen3-tied")
    tiny.save(tmp_path / "other", "qwen3-tied", seed=1)
    batch, reference = tiny.batch(), Reference(tiny.options(), tmp_path / "start")
    before = reference.logprobs(batch)
    tensors = dict(checkpoint_tensors(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=message):
        reference.load(change(tensors, how), "version 4")
    assert np.array_equal(reference.logprobs(batch), before)


def test_a_tensor_that_comes_twice_is_refused(tmp_path):
    tiny.save(tmp_path)
    reference = Reference(tiny.options(), tmp_path)
    with pytest.raises(CheckpointError, match=r"the published weights hold lm_head\.weight twice"):
        reference.load([*checkpoint_tensors(tmp_path), next(checkpoint_tensors(tmp_path))])


def test_a_reference_without_a_checkpoint_is_refused():
    with pytest.raises(ValueError, match="--ref-load is not set"):
        ReferenceWork(tiny.options())

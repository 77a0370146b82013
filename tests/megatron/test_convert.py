"""Conversion between Hugging Face and Megatron-Core, and the networks it fills."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.megatron import convert, model, parallel
from relax.megatron.checkpoint import CheckpointError, Tensors, read_architecture
from tests.megatron import tiny

KINDS = ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "qwen3-tied"]


def build(path: Path):
    grid = parallel.initialize(tiny.options())
    arch = read_architecture(path)
    network = model.build(arch, grid, model.transformer_config(arch, grid, torch.float32))
    convert.load(network, Tensors(path), convert.mapping(arch), arch, grid)
    return network.eval(), arch, grid


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind, tmp_path):
    reference = tiny.save(tmp_path, kind)
    network, _, _ = build(tmp_path)
    ids = torch.randint(0, tiny.VOCAB, (3, 48), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits, expected = network(ids, None, None), reference(ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_exact(kind, tmp_path):
    tiny.save(tmp_path, kind)
    network, arch, grid = build(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    exported = list(convert.export(convert.Shards.of(network), convert.mapping(arch), arch, grid))
    assert [name for name, _ in exported].count("lm_head.weight") == (0 if arch.tied else 1)
    assert len(exported) == len(dict(exported))
    assert dict(exported).keys() == stored.keys()
    for name, tensor in exported:
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_join_are_inverse_for_every_rank_count(kind, ranks, tmp_path):
    tiny.save(tmp_path, kind, num_key_value_heads=4)
    arch, tensors = read_architecture(tmp_path), Tensors(tmp_path)
    for entry in convert.mapping(arch):
        whole = list(tensors.read(entry.names))
        shards = [entry.layout.cut(whole, arch, rank, ranks) for rank in range(ranks)]
        assert len({shard.shape for shard in shards}) == 1
        assert entry.layout.dim is None or sum(s.numel() for s in shards) >= sum(w.numel() for w in whole)
        for expected, joined in zip(whole, entry.layout.join(shards, arch), strict=True):
            assert torch.equal(expected, joined), entry.names


def test_every_stage_owns_its_layers_under_local_names(tmp_path):
    tiny.save(tmp_path, "qwen3")
    arch = replace(read_architecture(tmp_path), layers=4)
    table = convert.mapping(arch, stages=2)
    norms = [(m.stage, m.parameter, m.names[0]) for m in table if m.parameter.endswith(".input_layernorm.weight")]
    assert norms == [
        (stage, f"decoder.layers.{local}.input_layernorm.weight", f"model.layers.{layer}.input_layernorm.weight")
        for layer, (stage, local) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])
    ]


def test_exported_tensors_do_not_change_with_the_network(tmp_path):
    tiny.save(tmp_path, "qwen3")
    network, arch, grid = build(tmp_path)
    exported = dict(convert.export(convert.Shards.of(network), convert.mapping(arch), arch, grid))
    before = exported["model.norm.weight"].clone()
    with torch.no_grad():
        network.decoder.final_layernorm.weight.add_(1)
    assert torch.equal(exported["model.norm.weight"], before)


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path):
    tiny.save(tmp_path, "qwen3")
    rewrite(tmp_path, lambda t: t.update(extra=t.pop("model.norm.weight")))
    with pytest.raises(CheckpointError, match=r": lacks model\.norm\.weight and holds extra"):
        build(tmp_path)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path):
    tiny.save(tmp_path, "qwen3")
    rewrite(tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(65)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[65\], config\.json says \[64\]"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; supported are llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'default'"),
    ],
)
def test_settings_the_network_would_not_compute_are_refused(changes, message, tmp_path):
    tiny.save(tmp_path, "qwen3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_architecture(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    tiny.save(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Tensors(tmp_path)

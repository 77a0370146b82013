"""The exported directory is a Hugging Face model: transformers loads it and computes what the policy computes."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from relax.megatron.export import save_hf
from relax.megatron.policy import Policy
from tests.megatron import tiny
from tests.megatron.test_policy import by_hand, token_mean


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama3-rope"])
def test_transformers_computes_what_the_trained_policy_computes(kind, tmp_path):
    tiny.save(tmp_path / "in", kind)
    (tmp_path / "in" / "tokenizer.json").write_text('{"a": 1}')
    batch = tiny.batch()
    policy = Policy(tiny.options(), tmp_path / "in")
    policy.train(batch, token_mean(batch))
    (tmp_path / "runs" / ".export.1.partial").mkdir(parents=True)  # of one that was killed
    policy.save_hf(tmp_path / "runs" / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "export").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        np.testing.assert_allclose(policy.logprobs(batch), by_hand(model, batch, 1.0)[0], atol=2e-5)
    assert (tmp_path / "runs" / "export" / "tokenizer.json").read_text() == '{"a": 1}'
    assert model.config.tie_word_embeddings == kind.endswith("tied")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["export"]


def test_large_models_are_written_in_several_files_with_an_index(tmp_path):
    reference = tiny.save(tmp_path / "in")
    policy = Policy(tiny.options(), tmp_path / "in")
    save_hf(policy.network, tmp_path / "out", shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
    # What was written in several files is also read again.
    again = Policy(tiny.options(), tmp_path / "out")
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state())


def test_config_tells_the_dtype_that_was_written(tmp_path):
    tiny.save(tmp_path / "in")
    Policy(tiny.options(train_dtype="bfloat16"), tmp_path / "in").save_hf(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_an_existing_directory_is_refused(tmp_path):
    tiny.save(tmp_path / "in")
    with pytest.raises(FileExistsError, match="exported to a new directory"):
        Policy(tiny.options(), tmp_path / "in").save_hf(tmp_path / "in")

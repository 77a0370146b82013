"""What a run needs on this machine, refused before anything starts."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from relax.config import machine
from relax.config.checks import check_options
from relax.config.keys import write_secret
from relax.config.machine import check_machine
from relax.config.resolve import resolve

Write = Callable[..., Path]


def refusals(file: Path, **flags: Any) -> list[str]:
    resolved = resolve(flags, file)
    assert not resolved.violations
    return [str(violation) for violation in check_machine(resolved)]


def test_a_complete_machine_passes(topology: Write) -> None:
    assert refusals(topology()) == []


def test_a_missing_checkpoint_names_the_place_it_was_looked_for(topology: Write) -> None:
    (told,) = refusals(topology(hf_checkpoint="no/such/model"))
    assert "does not exist" in told and str(Path.cwd() / "no/such/model") in told and "topology.yaml:" in told


def test_names_that_no_file_can_have_are_refused(topology: Write) -> None:
    name = "x" * 300
    for option in ("hf_checkpoint", "prompt_data"):
        (told,) = refusals(topology(**{option: name}))
        assert "cannot be looked up" in told and "--" + option.replace("_", "-") in told


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_checkpoint_is_refused(topology: Write, checkpoint: Path, file: str, told: str) -> None:
    (checkpoint / file).unlink()
    found = refusals(topology())
    assert any(told in violation for violation in found), found


def test_weights_cut_by_one_byte_are_noticed(topology: Write, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        (told,) = refusals(topology())
        assert "model.safetensors is no complete safetensors file" in told


def edit(checkpoint: Path, **values: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_an_architecture_that_is_not_supported_is_named(topology: Write, checkpoint: Path) -> None:
    edit(checkpoint, architectures=["MixtralForCausalLM"])
    (told,) = refusals(topology())
    assert "MixtralForCausalLM" in told and "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in told


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\ud800"])
def test_a_broken_config_json_is_refused(topology: Write, checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    (told,) = refusals(topology())
    assert "config.json" in told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"architectures": 5}, "architectures = 5"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures = 'Qwen3ForCausalLM'"),
        ({"hidden_size": "x"}, "hidden_size = 'x'"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"vocab_size": 101}, "vocab_size = 101 and hidden_size = 64, but model.embed_tokens.weight has the shape"),
        ({"hidden_size": 32}, "hidden_size = 32, but model.embed_tokens.weight has the shape [100, 64]"),
    ],
)
def test_values_in_config_json_that_cannot_be_are_named(
    topology: Write, checkpoint: Path, values: dict[str, Any], told: str
) -> None:
    edit(checkpoint, **values)
    (found,) = refusals(topology())
    assert found.startswith("--hf-checkpoint") and "its config.json" in found and told in found


def rewrite_header(weights: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    whole = weights.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    text = json.dumps(change(header) or header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + whole[start:])


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda header: [1, 2], "its header holds no object"),
        (lambda header: {EMBEDDING: 5}, f"no shape and place of {EMBEDDING}"),
        (lambda header: {EMBEDDING: {"dtype": "F32"}}, f"no shape and place of {EMBEDDING}"),
        (lambda header: header[EMBEDDING].update(shape=["100", 64]), f"no shape and place of {EMBEDDING}"),
        (lambda header: header[EMBEDDING].update(data_offsets=[4]), f"no shape and place of {EMBEDDING}"),
        (lambda header: header[EMBEDDING].update(shape=[100, 65]), f"{EMBEDDING} of shape [100, 65] takes"),
    ],
)
def test_a_broken_header_is_told_with_file_and_tensor(
    topology: Write, checkpoint: Path, change: Callable[[dict[str, Any]], Any], told: str
) -> None:
    rewrite_header(checkpoint / "model.safetensors", change)
    (found,) = refusals(topology())
    assert "model.safetensors is no complete safetensors file" in found and told in found and "Download" in found


def test_weights_without_a_tensor_are_refused(topology: Write, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (found,) = refusals(topology())
    assert "hold no tensor (model.safetensors)" in found


def test_shards_that_were_not_downloaded_are_named(topology: Write, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    (without_index,) = refusals(topology())
    assert "misses model-00002-of-00002.safetensors" in without_index
    shards = {EMBEDDING: "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (with_index,) = refusals(topology())
    assert "misses model-00002-of-00002.safetensors" in with_index and str(index) in with_index
    index.write_text(json.dumps({"weight_map": {"a.b": "model-00001-of-00002.safetensors"}}))
    (not_there,) = refusals(topology())
    assert "its weights have no a.b" in not_there
    for text in ("{", "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        (broken,) = refusals(topology())
        assert str(index) in broken and "Download it again" in broken


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "<html>"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_once(topology: Write, checkpoint: Path, file: str, text: str) -> None:
    (checkpoint / file).write_text(text)
    (found,) = refusals(topology())
    assert found.startswith("--hf-checkpoint") and str(checkpoint / file) in found and "save_pretrained" in found


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_parallel_size": 4}, "num_attention_heads, 2"),
        ({"tensor_parallel_size": 5}, "intermediate_size, 192"),
        ({"pipeline_parallel_size": 3}, "2 layers"),
        ({"rollout_max_response_len": 500}, "564 tokens; the model takes 512"),
    ],
)
def test_sizes_that_do_not_fit_the_model(topology: Write, options: dict[str, Any], told: str) -> None:
    found = refusals(topology(**options))
    assert any(told in violation for violation in found), found


def test_a_reward_in_the_file_and_one_by_flag_are_both_located(topology: Write) -> None:
    file = topology()
    (told,) = refusals(file, custom_rm_path="a:b")
    line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if "rm_type" in text)
    assert told.startswith("--custom-rm-path = 'a:b' (from flag)")
    assert f"Drop --rm-type (from {file}:{line}) or --custom-rm-path (from flag)." in told


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_two_versions_of_the_weights_must_fit_into_shared_memory(
    topology: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * 113_344 * 4
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(needed, 0, needed))
    assert refusals(topology()) == []
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(needed, 1, needed - 1))
    (told,) = refusals(topology())
    assert "shared memory is too small" in told and "0.9 MiB" in told and "113,344" in told
    assert refusals(topology(), train_dtype="bfloat16") == []


def test_cores_that_this_machine_does_not_have(topology: Write) -> None:
    (told,) = refusals(topology(services={"rollout": {"cores": [4095]}}))
    assert "services.rollout.cores = [4095]" in told and "topology.yaml:" in told
    here = sorted(os.sched_getaffinity(0))
    assert refusals(topology(services={"rollout": {"cores": here}})) == []


@pytest.mark.parametrize(
    ("write", "option", "told"),
    [
        (lambda file: file.unlink(), "--prompt-data", "prompts.jsonl"),
        (lambda file: file.write_text(""), "--prompt-data", "prompts.jsonl"),
        (lambda file: file.write_text('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n'), "--prompt-data", "line 3"),
        (lambda file: file.write_text('{"prompt": "a", "gold": "b"}\n'), "--label-key", "gold"),
    ],
)
def test_faults_of_the_prompts_are_refused_here_too(
    topology: Write, prompts: Path, write: Callable[[Path], Any], option: str, told: str
) -> None:
    file = topology()
    write(prompts)
    found = refusals(file)
    assert found and found[0].startswith(option) and told in found[0]


def test_a_node_is_asked_only_for_what_its_services_need(topology: Write, prompts: Path) -> None:
    nodes = {"a": {"address": "h1"}, "b": {"address": "h2"}}
    services = {role: {"node": "a"} for role in ("controller", "reward", "advantages", "actor")}
    top = {"controller": "tcp://h1:5755", "nodes": nodes}
    file = topology(services={**services, "rollout": {"node": "b", "cores": [4095]}}, top=top, insecure=True)
    prompts.unlink()
    resolved = resolve({}, file)
    assert [violation.option for violation in check_machine(resolved, "a")] == ["--prompt-data"]
    assert [violation.option for violation in check_machine(resolved, "b")] == ["services.rollout.cores"]


def test_keys_are_checked_before_anything_starts(topology: Write, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    file = topology(top={"controller": "tcp://10.0.0.1:5755"}, keys=str(keys))
    (found,) = refusals(file)
    assert found.startswith(f"--keys = {str(keys / 'relax.key')!r}") and "--keygen" in found
    secret = write_secret(keys, "0" * 40)
    assert not refusals(file)
    secret.chmod(0o644)
    (found,) = refusals(file)
    assert "can be used by others (mode 644)" in found and f"chmod 600 {secret}" in found


def test_an_address_that_only_one_node_has_is_reachable_all_the_same(topology: Write) -> None:
    services = {role: {"node": "a"} for role in ("controller", "rollout", "reward", "advantages", "actor")}
    (found,) = check_options(resolve({}, topology(services=services, top={"nodes": {"a": {"address": "h1"}}})))
    assert found.option == "--keys" and "tcp://h1:0 is reachable" in found.problem


def reference(tmp_path: Path, checkpoint: Path, topology: Write, **options: Any) -> Path:
    """A run with a reference, from a copy of the policy's checkpoint in tmp_path / "reference"."""
    shutil.copytree(checkpoint, tmp_path / "reference")
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(tmp_path / "reference"), "ref_update_interval": 2}
    return topology(services={"reference": {}}, **(kl | options))


def turn_a_tensor(weights: Path) -> str:
    """Write a tensor's shape the other way round; returns its name."""
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite_header(weights, lambda header: header[name]["shape"].reverse())
    return name


def test_a_reference_like_the_policy_passes_and_needs_no_tokenizer(
    topology: Write, tmp_path: Path, checkpoint: Path
) -> None:
    file = reference(tmp_path, checkpoint, topology)
    (tmp_path / "reference" / "tokenizer.json").unlink()
    assert refusals(file) == []


def test_a_reference_that_cannot_be_read_is_refused(topology: Write, tmp_path: Path, checkpoint: Path) -> None:
    file = reference(tmp_path, checkpoint, topology)
    (tmp_path / "reference" / "model.safetensors").unlink()
    (told,) = refusals(file)
    assert told.startswith("--ref-load") and "has no weights" in told and "topology.yaml:" in told


def test_a_reference_of_another_vocabulary_is_refused(topology: Write, tmp_path: Path, checkpoint: Path) -> None:
    file = reference(tmp_path, checkpoint, topology)
    edit(tmp_path / "reference", vocab_size=50, hidden_size=128)
    rewrite_header(
        tmp_path / "reference" / "model.safetensors", lambda header: header[EMBEDDING].update(shape=[50, 128])
    )
    (told,) = refusals(file)
    assert told.startswith("--ref-load") and "a vocabulary of 50 tokens" in told


@pytest.mark.parametrize("interval", [None, 2])
def test_a_reference_of_another_shape_is_refused_where_it_is_refreshed(
    topology: Write, tmp_path: Path, checkpoint: Path, interval: int | None
) -> None:
    file = reference(tmp_path, checkpoint, topology, ref_update_interval=interval)
    name = turn_a_tensor(tmp_path / "reference" / "model.safetensors")
    found = refusals(file)
    assert bool(found) == (interval is not None)
    assert all(name in told and "--ref-update-interval" in told for told in found)


def test_the_sizes_of_a_reference_must_fit_its_own_model(topology: Write, tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "reference")
    edit(tmp_path / "reference", num_hidden_layers=3)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(tmp_path / "reference")}
    (told,) = refusals(topology(services={"reference": {"pipeline_parallel_size": 2}}, **kl))
    assert told.startswith("services.reference.pipeline_parallel_size") and "3 layers" in told

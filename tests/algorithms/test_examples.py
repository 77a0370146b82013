"""Every example passes --dry-run, without a warning; the recipes of the README and the scripts are what is tried."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from relax.algorithms import registry
from relax.config import machine
from relax.data import DataError
from relax.launch.cli import main
from relax.rewards.verifiers import math_equal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "algorithms"
TINY = ROOT / "topologies" / "tiny"
RECIPES = re.findall(r"`bin/relax-launch (examples/algorithms/\S+\.yaml[^`]*)`", (EXAMPLES / "README.md").read_text())

DryRun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> DryRun:
    """arguments of relax-launch -> (exit code, stdout, stderr)"""
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*arguments, "--dry-run"])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_of_the_readme_passes_without_a_warning(dry_run: DryRun, recipe: str) -> None:
    code, out, err = dry_run(*recipe.split())
    assert (code, err) == (0, "") and "Nothing was started." in out


def test_every_algorithm_has_its_recipe() -> None:
    assert {f"examples/algorithms/{name}.yaml" for name in registry.names()} <= set(RECIPES)


# --- GSM8K -----------------------------------------------------------------------------------------------------------

spec = importlib.util.spec_from_file_location("gsm8k", EXAMPLES / "gsm8k.py")
assert spec is not None and spec.loader is not None
gsm8k = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gsm8k)

SOLUTIONS = ["Half of 48 is <<48/2=24>>24. 48 + 24 = 72.\n#### 72", "So\n#### 1,000", "#### -3", "#### $18.50"]
LABELS = ["72", "1000", "-3", "18.50"]
ROWS = [{"question": f" Question {i}? ", "answer": answer} for i, answer in enumerate(SOLUTIONS)]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 16))
    (folder / "test.jsonl").write_text("no row of training\n")
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_become_prompts_with_the_instruction_and_labels_that_the_math_reward_takes(
    dataset: Path, tmp_path: Path
) -> None:
    made = rows(gsm8k.prepare(dataset, tmp_path / "cache"))
    assert len(made) == 64 and [row["label"] for row in made[:4]] == LABELS
    assert made[0]["prompt"].startswith("Question 0?\n") and "\\boxed{}" in made[0]["prompt"]
    reward = math_equal()
    for row in made[:4]:
        assert reward("", f"It is \\boxed{{{row['label']}}}.", row["label"], row) == 1
        assert reward("", "It is \\boxed{71}.", row["label"], row) == 0


def test_parquet_shards_give_the_rows_of_the_jsonl_file(dataset: Path, tmp_path: Path) -> None:
    shards = tmp_path / "hub" / "main"
    shards.mkdir(parents=True)
    for index, part in enumerate((ROWS[:3], ROWS[3:] + ROWS * 15)):
        parquet.write_table(pa.Table.from_pylist(part), shards / f"train-0000{index}-of-00002.parquet")
    parquet.write_table(pa.table({"x": [1]}), shards / "test-00000-of-00001.parquet")
    cache = tmp_path / "cache"
    assert rows(gsm8k.prepare(shards.parent, cache)) == rows(gsm8k.prepare(dataset, cache))


def test_rows_are_normalized_once_and_again_when_the_data_changes(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = gsm8k.prepare(dataset, cache)
    written = first.stat().st_mtime_ns
    assert gsm8k.prepare(dataset, cache) == first and first.stat().st_mtime_ns == written
    with (dataset / "train.jsonl").open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    second = gsm8k.prepare(dataset, cache)
    assert second != first and len(rows(second)) == 65
    assert sorted(cache.iterdir()) == sorted([first, second])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "?", "answer": "It is 72."}, "no '#### <number>' at the end of 'It is 72.'"),
        ({"question": "?", "answer": "#### many"}, "no '#### <number>'"),
        ({"question": "?"}, "KeyError 'answer'"),
        ({"question": None, "answer": "#### 1"}, "AttributeError"),
    ],
)
def test_row_of_another_dataset_is_named(dataset: Path, tmp_path: Path, row: dict[str, Any], told: str) -> None:
    (dataset / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=re.escape(told)) as refused:
        gsm8k.prepare(dataset, tmp_path / "cache")
    assert "train.jsonl line 2: " in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_directory_without_the_dataset_says_what_it_must_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl or train\*\.parquet or main/train"):
        gsm8k.prepare(tmp_path, tmp_path / "cache")


# --- scripts ---------------------------------------------------------------------------------------------------------

SMALL = (
    "--no-apply-chat-template --rollout-max-prompt-len 400 --rollout-max-response-len 16 --rollout-dtype float32 "
    "--train-dtype float32 --rollout-kv-cache-mb 64"
)


@pytest.fixture
def script(tmp_path: Path, dataset: Path) -> Callable[..., list[str]]:
    """Runs a training script in a checkout whose relax-launch writes down its arguments; returns them.

    So the scripts themselves run, and their command line is then tried in this process.
    """
    checkout = tmp_path / "checkout"
    (checkout / "bin").mkdir(parents=True)
    (checkout / "examples").symlink_to(ROOT / "examples")
    launch = checkout / "bin" / "relax-launch"
    launch.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    launch.chmod(0o755)
    usual = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MODEL_DIR": str(TINY),
        "DATA_DIR": str(dataset),
    }

    def run(name: str, *arguments: str, **variables: str) -> list[str]:
        path = str(checkout / "examples" / "algorithms" / name)
        done = subprocess.run(
            [path, *arguments],
            env={**usual, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def shown(out: str, option: str) -> str:
    """The value of an option as --dry-run shows it."""
    (line,) = (line for line in out.splitlines() if line.split()[:1] == [option])
    return line.split()[1]


def test_rloo_script_runs_with_its_defaults(dry_run: DryRun, script: Callable[..., list[str]], tmp_path: Path) -> None:
    code, out, err = dry_run(*script("rloo_qwen3_0.6b_gsm8k.sh", *SMALL.split()))
    assert (code, err) == (0, "")
    assert shown(out, "--advantage-estimator") == "rloo" and shown(out, "--global-batch-size") == "256"
    prompts = Path(shown(out, "--prompt-data"))
    assert prompts.parent == tmp_path / "checkout" / "runs" / "gsm8k" and len(rows(prompts)) == 64


def test_rloo_script_takes_its_variables(dry_run: DryRun, script: Callable[..., list[str]], tmp_path: Path) -> None:
    variables = {
        "NUM_ROLLOUT": "3",
        "ROLLOUT_BATCH_SIZE": "4",
        "N_SAMPLES": "2",
        "GLOBAL_BATCH_SIZE": "8",
        "RLOO_DATA_CACHE_DIR": str(tmp_path / "elsewhere"),
    }
    code, out, err = dry_run(*script("rloo_qwen3_0.6b_gsm8k.sh", *SMALL.split(), **variables))
    assert (code, err) == (0, "")
    for option, value in (
        ("--num-rollout", "3"),
        ("--rollout-batch-size", "4"),
        ("--n-samples-per-prompt", "2"),
        ("--global-batch-size", "8"),
        ("--hf-checkpoint", str(TINY)),
    ):
        assert shown(out, option) == value
    assert Path(shown(out, "--prompt-data")).parent == tmp_path / "elsewhere"


def test_control_arm_differs_in_the_algorithm_alone(dry_run: DryRun, script: Callable[..., list[str]]) -> None:
    plain = dry_run(*script("rloo_qwen3_0.6b_gsm8k.sh", *SMALL.split()))[1].splitlines()
    code, out, _ = dry_run(*script("rloo_qwen3_0.6b_gsm8k.sh", *SMALL.split(), ADVANTAGE_ESTIMATOR="grpo"))
    assert code == 0
    different = {line.split()[0] for line in set(plain) ^ set(out.splitlines())}
    assert different == {"--advantage-estimator", "--run-name"}


def test_rloo_script_leaves_the_contract_to_relax_launch(dry_run: DryRun, script: Callable[..., list[str]]) -> None:
    code, _, err = dry_run(*script("rloo_qwen3_0.6b_gsm8k.sh", *SMALL.split(), GLOBAL_BATCH_SIZE="64"))
    assert code == 2 and "Set --global-batch-size 256" in err


@pytest.mark.parametrize("missing", ["MODEL_DIR", "DATA_DIR"])
def test_script_asks_for_what_it_needs(missing: str) -> None:
    given = {"PATH": os.environ["PATH"], "MODEL_DIR": "m", "DATA_DIR": "d"}
    del given[missing]
    command = [str(EXAMPLES / "grpo_qwen3_4b.sh")]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and f"{missing}: directory of" in done.stderr


# config.json of Qwen/Qwen3-4B, as published.
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def qwen3_4b(folder: Path) -> Path:
    """A checkpoint of the shape of Qwen3-4B whose weights are a hole in a file: a header and no byte written behind."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    shutil.copy(TINY / "tokenizer.json", folder)
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    hidden, inner, head = QWEN3_4B["hidden_size"], QWEN3_4B["intermediate_size"], QWEN3_4B["head_dim"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(head, int)
    shapes = {"model.embed_tokens.weight": [151936, hidden], "model.norm.weight": [hidden]}
    for layer in range(36):
        for name, shape in {
            "self_attn.q_proj.weight": [32 * head, hidden],
            "self_attn.k_proj.weight": [8 * head, hidden],
            "self_attn.v_proj.weight": [8 * head, hidden],
            "self_attn.o_proj.weight": [hidden, 32 * head],
            "self_attn.q_norm.weight": [head],
            "self_attn.k_norm.weight": [head],
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return folder


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("name", "ranks"), [("grpo_qwen3_4b.sh", {"actor": 4}), ("ppo_qwen3_4b.sh", {"actor": 2, "critic": 2})]
)
def test_qwen3_4b_scripts_pass_on_eight_gpus(
    dry_run: DryRun,
    script: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ranks: dict[str, int],
) -> None:
    room = 17 * 2**30
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(room, 0, room))
    command = script(name, MODEL_DIR=str(qwen3_4b(tmp_path / "Qwen3-4B")))
    code, out, err = dry_run(*command)
    assert (code, err) == (0, "")
    devices = re.findall(r"^  \S+ .*devices (\S+)", out, re.MULTILINE)
    assert sorted(int(device) for group in devices for device in group.split(",")) == list(range(8))
    for role, count in ranks.items():
        assert re.search(rf"^  {role} +(engine megatron  )?{count} ranks", out, re.MULTILINE), out


def test_qwen3_4b_wants_its_room_in_shared_memory(
    dry_run: DryRun, script: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(2**30, 0, 2**30))
    code, _, err = dry_run(*script("grpo_qwen3_4b.sh", MODEL_DIR=str(qwen3_4b(tmp_path / "Qwen3-4B"))))
    assert code == 2 and "shared memory is too small" in err and "4,022,468,096 weights" in err


def test_tiny_command_of_the_readme_passes(dry_run: DryRun, script: Callable[..., list[str]], tmp_path: Path) -> None:
    text = (EXAMPLES / "README.md").read_text()
    (block,) = re.findall(r"^    (MODEL_DIR=topologies/tiny .*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    words = shlex.split(block.replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    flags = words[words.index("examples/algorithms/rloo_qwen3_0.6b_gsm8k.sh") + 1 :]
    variables.pop("DATA_DIR")
    code, _, err = dry_run(*script("rloo_qwen3_0.6b_gsm8k.sh", *flags, **variables))
    assert (code, err) == (0, "")

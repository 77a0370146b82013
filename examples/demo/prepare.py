#!/usr/bin/env python
"""Makes what the demo starts from: a weak model as a Hugging Face checkpoint, training and held-out prompts.

    prepare.py [--seed 1]

Writes runs/demo-assets/seed-<n>/ with model/, train.jsonl, heldout.jsonl and assets.json, and reuses it as long as the
scripts that made it have not changed. Takes some tens of seconds on one core.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[2] / "runs" / "demo-assets"
TRAIN_ROWS, HELD_OUT_ROWS = 4096, 512
_HELD_OUT_SEED = 9 * 10**9
_MAKERS = ("task.py", "model.py", "evaluate.py", "warm_start.py", "prepare.py")


@dataclass(frozen=True, slots=True)
class Assets:
    """Where the demo's inputs are, and how good the start is: `accuracy` of sampled answers to training words."""

    directory: Path
    seed: int
    accuracy: float
    seconds: float

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def train(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.directory / "heldout.jsonl"


def prepare(seed: int, root: Path = ASSETS) -> Assets:
    """The assets of `seed`, made if they are missing or were made by other scripts."""
    directory = root / f"seed-{seed}"
    found = _load(directory)
    if found is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a directory that exists is complete.
    aside = Path(tempfile.mkdtemp(prefix=f".seed-{seed}-", dir=root))
    try:
        _make(seed, aside)
        aside.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        aside.replace(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    made = _load(directory)
    assert made is not None
    return made


def _make(seed: int, directory: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from model import build_tokenizer
    from task import entries
    from warm_start import sampled_accuracy, warm_start

    from relax.data import PromptTokenizer

    # One thread: sums in another order would make another model.
    torch.set_num_threads(1)
    began = time.monotonic()
    # Words of the two sides never meet; the seeds keep the entries of runs apart.
    _write(directory / "train.jsonl", list(islice(entries(5 * 10**9 + 10**7 * seed, held_out=False), TRAIN_ROWS)))
    distinct = {entry["prompt"]: entry for entry in islice(entries(_HELD_OUT_SEED, held_out=True), 2 * HELD_OUT_ROWS)}
    _write(directory / "heldout.jsonl", list(distinct.values())[:HELD_OUT_ROWS])
    build_tokenizer().save_pretrained(directory / "model")
    tokenizer = PromptTokenizer(directory / "model")
    model = warm_start(tokenizer, seed)
    model.save_pretrained(directory / "model")
    accuracy = sampled_accuracy(model, tokenizer, seed)
    if not 0.1 <= accuracy <= 0.4:
        raise RuntimeError(f"the warm start with seed {seed} is right {accuracy:.0%} of the time, not about 20%")
    record = {
        "makers": _makers(),
        "seed": seed,
        "accuracy": round(accuracy, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    (directory / "assets.json").write_text(json.dumps(record, indent=1) + "\n")


def _load(directory: Path) -> Assets | None:
    record_file = directory / "assets.json"
    if not record_file.is_file():
        return None
    record = json.loads(record_file.read_text())
    if record.pop("makers") != _makers():
        return None
    return Assets(directory, **record)


def _makers() -> str:
    """A digest of the scripts that make the assets."""
    here = Path(__file__).resolve().parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in _MAKERS)).hexdigest()


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo's weak model and its prompts.")
    parser.add_argument("--seed", type=int, default=1)
    assets = prepare(parser.parse_args().seed)
    print(f"{assets.directory}: right {assets.accuracy:.0%} of the time ({assets.seconds} s)")


if __name__ == "__main__":
    main()

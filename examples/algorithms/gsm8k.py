#!/usr/bin/env python
"""GSM8K as prompts for Relax: `gsm8k.py DATA_DIR CACHE_DIR` writes the normalized rows once and prints their file.

DATA_DIR is the dataset as it is given out: train.jsonl, or main/train-*.parquet. Its rows have a question and a
solution that ends in `#### 72`; they become {"prompt": question and instruction, "label": "72"}.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from relax.data import DataError, open_source

INSTRUCTION = "Let's think step by step and put the final answer within \\boxed{}."
PATTERNS = ("train.jsonl", "train*.parquet", "main/train.jsonl", "main/train*.parquet", "data/train*.parquet")
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def prepare(data: Path, cache: Path) -> Path:
    """The file of normalized rows, made if it is missing.

    Its name holds a digest of data and instruction, so that it is never that of others. Raises DataError for a row that
    is no row of GSM8K.
    """
    files = training_files(data)
    digest = hashlib.sha256(INSTRUCTION.encode())
    for file in files:
        digest.update(file.read_bytes())
    target = cache / f"gsm8k-{digest.hexdigest()[:16]}.jsonl"
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: a file that exists is complete.
        aside = target.with_suffix(f".{os.getpid()}")
        try:
            with aside.open("w", encoding="utf-8") as out:
                out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in normalized(files))
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    return target


def training_files(data: Path) -> list[Path]:
    """The files of the training split, in the order of their names."""
    if data.is_file():
        return [data]
    for pattern in PATTERNS:
        if files := sorted(data.glob(pattern)):
            return files
    raise DataError(f"{data} holds no GSM8K", f"It must hold {' or '.join(PATTERNS)}.")


def normalized(files: list[Path]) -> Iterator[dict[str, str]]:
    for file in files:
        source = open_source(str(file), seed=0)
        for index in range(len(source)):
            row = source.row(index)
            try:
                yield {"prompt": f"{row['question'].strip()}\n{INSTRUCTION}", "label": final_answer(row["answer"])}
            except (KeyError, AttributeError, ValueError) as error:
                fix = "A row needs the texts `question` and `answer`, which ends in '#### <number>'."
                raise DataError(f"{source.where(index)}: {type(error).__name__} {error}", fix) from None


def final_answer(solution: str) -> str:
    """`... so 1,000 in all.\\n#### 1,000` -> `1000`."""
    _, mark, after = solution.rpartition("####")
    number = after.strip().replace(",", "").removeprefix("$")
    if not mark or not NUMBER.fullmatch(number):
        raise ValueError(f"no '#### <number>' at the end of {solution[-60:]!r}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description="Normalizes GSM8K; prints the file of prompts.")
    parser.add_argument("data", type=Path, help="directory of the dataset")
    parser.add_argument("cache", type=Path, help="directory for the normalized rows")
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.data, arguments.cache))
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

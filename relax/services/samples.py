"""samples/<batch>.parquet: what the model answered and what it was paid, for people to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relax.protocol.tensors import FINISH_LENGTH


def write_samples(directory: Path, batch: int, members: Sequence[Any], tokenizer: Any) -> None:
    """One row a sample of the batch's scored groups, written aside and renamed."""
    rows: dict[str, list[Any]] = {}
    for member in members:
        order, sampled = member.order, member.sampled
        prompt = tokenizer.decode(order.prompt_tokens)
        for i, response in enumerate(sampled.responses()):
            versions = sampled.runs[sampled.runs[:, 0] == i][:, 1:].tolist()
            row = {
                "batch": batch,
                "group": order.lease.group,
                "sample": i,
                "prompt_id": order.prompt_id,
                "epoch": order.epoch,
                "attempt": order.lease.attempt,
                "prompt": prompt,
                "response": tokenizer.decode(response),
                "reward": float(member.rewards[i]),
                "response_len": len(response),
                "truncated": bool(sampled.finish[i] == FINISH_LENGTH),
                "versions": versions,
            }
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / f".{batch:06d}.parquet"
    pq.write_table(pa.table(rows), aside)
    aside.rename(directory / f"{batch:06d}.parquet")

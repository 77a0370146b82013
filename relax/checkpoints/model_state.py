"""What a model's part of a checkpoint says of itself: its state.json, which is read without torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from relax.checkpoints.parts import File, PartError, write_new

FORMAT = 1
STATE = "state.json"
GRID = ("world", "tensor", "pipeline", "context", "data", "sequence_parallel")
"""What a grid of ranks is told by."""
_FOREIGN = (".metadata", "common.pt")


@dataclass(frozen=True, slots=True)
class ModelState:
    """`architecture` is that of relax.megatron.checkpoint, `grid` has the names of GRID, `about` is the caller's own.
    `steps`, `skipped_steps` and `updates` are a learner's, None without one."""

    network: str
    architecture: Mapping[str, Any]
    dtype: str
    grid: Mapping[str, Any]
    steps: int | None
    skipped_steps: int | None
    updates: int | None
    about: Mapping[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> File:
        """Writes the file, synced. Raises OSError."""
        return write_new(directory / STATE, json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> "ModelState":
        """Raises PartError where there is none, or another format."""
        path = directory / STATE
        try:
            state = json.loads(path.read_bytes())
            if state["format"] != FORMAT:
                raise PartError(f"{path}: format {state['format']}; this version of Relax reads {FORMAT}")
        except FileNotFoundError:
            if foreign := [name for name in _FOREIGN if (directory / name).exists()]:
                raise PartError(
                    f"{directory} has no {STATE} but {foreign[0]}: Megatron's own format, which is read by unpickling "
                    "and therefore not read here; convert it to a Hugging Face directory for --hf-checkpoint"
                ) from None
            raise PartError(f"{path} is missing; {directory} is no checkpoint of a model") from None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, PartError):
                raise
            raise PartError(f"{path} is no JSON text of a checkpoint's state: {error!r}") from None
        if lacking := [one.name for one in fields(cls) if one.name not in state]:
            raise PartError(f"{path} lacks an entry: {', '.join(lacking)}")
        if odd := [name for name in ("architecture", "grid", "about") if not isinstance(state[name], dict)]:
            raise PartError(f"{path}: {odd[0]} is {state[odd[0]]!r}, no table")
        return cls(**{one.name: state[one.name] for one in fields(cls)})


def grid_text(grid: Mapping[str, Any]) -> str:
    """`4 ranks (tensor 2, data 2)`"""
    sizes = ", ".join(f"{name} {grid[name]}" for name in GRID[1:-1] if grid.get(name, 1) != 1)
    sequence = ", sequence parallel" if grid.get("sequence_parallel") else ""
    world = grid.get("world")
    return f"{world} rank{'s' if world != 1 else ''}" + (f" ({sizes}{sequence})" if sizes else "")

"""What one turn of the controller's loop changed, as rows of the tables in schema.py."""

from dataclasses import dataclass, field
from typing import Any

Row = tuple[Any, ...]


@dataclass(slots=True)
class Changes:
    """Rows to insert or update, by table; columns in the order of the schema. Written in one transaction."""

    groups: list[Row] = field(default_factory=list)
    batches: list[Row] = field(default_factory=list)
    versions: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    counters: list[Row] = field(default_factory=list)

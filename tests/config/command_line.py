"""A command line and a topology file, resolved as a process of a run does it."""

from collections.abc import Sequence
from pathlib import Path

from relax.config import Resolved
from relax.config import load as load_given
from relax.config.flags import Parser


def load(argv: Sequence[str], topology: Path | None) -> Resolved:
    return load_given(Parser("relax-service", "test").parse(argv), topology)

"""docs/configuration.md says what --help says."""

from pathlib import Path

import pytest

from relax.config.fields import extra, flag
from relax.config.options import SECTIONS, Options
from relax.config.resolve import shown

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
AVAILABLE = [name for section in SECTIONS for name in shown(section)]


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_page_has_every_option_and_its_help(name: str) -> None:
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{flag(name)}` |")), None)
    assert row is not None, f"{flag(name)} is missing"
    assert row.endswith(f"| {Options.model_fields[name].description} |")


@pytest.mark.parametrize("name", sorted(set(Options.model_fields) - set(AVAILABLE)))
def test_the_page_does_not_offer_what_is_not_there(name: str) -> None:
    assert extra(Options.model_fields[name]).unavailable
    assert f"| `{flag(name)}` |" not in PAGE

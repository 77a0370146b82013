"""The worked example of docs/algorithms.md runs as it stands on the page."""

import re
from pathlib import Path

import pytest

from relax.algorithms import registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *script = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    name = re.match(r"# (\w+\.py)\n", module)
    assert name is not None, "the first block begins with the name of its file"
    (tmp_path / name[1]).write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))  # the other tests see nine algorithms
    exec(compile("\n".join(script), str(PAGE), "exec"), {})

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax.data import DataError, open_source
from relax.data.generated import config_fields, task_names


def test_jsonl_rows_keep_their_index_and_line_across_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n\n   \n{"prompt": "zw\xc3\xb6lf"}\r\n{"prompt": "last"}')
    source = open_source(str(path), seed=0)
    assert len(source) == 3
    assert [source.row(i)["prompt"] for i in (2, 0, 1)] == ["last", "one", "zwölf"]
    assert source.where(1) == f"{path} line 4"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n  \n", "only blank lines"),
        ('{"prompt": 1}\n{"prompt": 2}\n{"prompt": 3\n', "line 3 is not JSON"),
        ('{"prompt": 1}\n[1, 2]\n', "line 2 holds a JSON list"),
    ],
)
def test_bad_jsonl_is_refused_with_its_place(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        source = open_source(str(path), seed=0)
        for i in range(len(source)):
            source.row(i)


@pytest.mark.parametrize(("name", "says"), [("none.jsonl", "no such file"), (".", "directory"), ("p.csv", "'.csv'")])
def test_unusable_paths_are_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "p.csv").write_text("prompt\n")
    with pytest.raises(DataError, match=says):
        open_source(str(tmp_path / name), seed=0)


def test_parquet_rows_are_json_compatible(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "label": i, "day": datetime.date(2024, 1, i + 1)}
        for i in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    source = open_source(str(path), seed=0)
    assert len(source) == 3
    expected = {"prompt": [{"role": "user", "content": "hi"}], "label": 2, "day": "2024-01-03"}
    assert json.loads(json.dumps(source.row(2))) == expected
    assert source.where(2) == f"{path} row 3"


def test_parquet_that_is_none_empty_or_binary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_text("no")
    with pytest.raises(DataError, match="not a Parquet file"):
        open_source(str(path), seed=0)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="is empty"):
        open_source(str(path), seed=0)
    pq.write_table(pa.table({"prompt": ["a"], "image": pa.array([b"x"])}), path)
    with pytest.raises(DataError, match="'image' is binary"):
        open_source(str(path), seed=0)


def test_generated_items_follow_the_query_and_the_seed() -> None:
    spec = "reasoning_gym:spell_backward?min_word_len=3&max_word_len=4&size=20"
    source = open_source(spec, seed=5)
    rows = [source.row(i) for i in range(len(source))]
    assert len(rows) == 20
    assert all(3 <= len(row["metadata"]["word"]) <= 4 and row["prompt"] == row["question"] for row in rows)
    assert rows == [open_source(spec + "&seed=5", seed=99).row(i) for i in range(20)]
    assert rows != [open_source(spec, seed=1000).row(i) for i in range(20)]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("reasoning_gym:spell_backwards", "no task 'spell_backwards'. Did you mean 'spell_backward'"),
        ("reasoning_gym:spell_backward?max_word_length=4", "no setting 'max_word_length'. Did you mean 'max_word_len'"),
        ("reasoning_gym:spell_backward?size", "'size' is not key=value"),
        ("reasoning_gym:spell_backward?min_word_len=9&max_word_len=4", "refuses these settings: max_word_len must be"),
    ],
)
def test_bad_generated_specs_are_refused(spec: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_source(spec, seed=0)


def test_names_and_fields_read_from_source_text_are_those_of_the_registry() -> None:
    import dataclasses

    from reasoning_gym.factory import DATASETS

    assert set(task_names()) == set(DATASETS) - {"composite"}
    for task in task_names():
        assert config_fields(task) == [field.name for field in dataclasses.fields(DATASETS[task][1])], task


def test_datasets_import_no_torch() -> None:
    code = "import sys, relax.data; sys.exit('torch' in sys.modules or 'reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

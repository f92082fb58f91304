"""Sources of packages that are not always there: what is said without them, and what their job files may hold."""

from __future__ import annotations

import sys

import pytest
from doll.errors import ConfigError
from doll.producers import sources
from doll.producers.position import source_name
from job_files import job


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [("parquet", "pyarrow", "parquet"), ("dataset", "datasets", "datasets"), ("dataset", "pyarrow", "datasets")],
)
def test_without_its_package_a_source_says_what_to_install(
    kind: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("doll.producers.sources.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("parquet", "table_rows", "huggingface"):
        monkeypatch.delattr(sources, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"source.kind: {kind} needs .*pip install 'doll-online\[{extra}\]'"):
        sources.open_streams(job(text=f"source: {{kind: {kind}, path: d}}", workers=1), [0])


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_rows_of_tables_are_json_and_no_other_format(kind: str) -> None:
    source = f"source: {{kind: {kind}, path: d}}"
    for given in ("", "data: {format: {kind: json}}"):
        job(text=f"{source}\n{given}")
    with pytest.raises(ConfigError, match=r"data.format: expected none, or \{kind: json\}, .* got kind: csv"):
        job(text=f"{source}\ndata: {{format: {{kind: csv, columns: [x]}}}}")
    with pytest.raises(ConfigError, match="columns: expected different names, got x, y, x"):
        job(text=f"source: {{kind: {kind}, path: d, columns: [x, y, x]}}")


def test_a_position_is_one_of_the_rows_whatever_columns_are_sent() -> None:
    def name(source: str) -> str:
        return source_name(job(text=f"source: {source}").source)

    assert name("{kind: parquet, path: d, columns: [x]}") == name("{kind: parquet, path: d, repeat: true}")
    names = [
        "{kind: parquet, path: d}", "{kind: parquet, path: e}", "{kind: dataset, path: d}",
        "{kind: dataset, path: d, split: train}", "{kind: csv, path: d}",
    ]  # fmt: skip
    assert len({name(source) for source in names}) == len(names)

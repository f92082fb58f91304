"""Files are replaced as a whole, or stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.process.files import read_json, replacing, write_atomically, write_json


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_content_is_replaced_and_no_temporary_file_stays(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "new" / "state.txt"
    write_atomically(path, "first", durable=durable)
    write_atomically(path, b"\x00second", durable=durable)
    assert path.read_bytes() == b"\x00second"
    assert files_in(path.parent) == ["state.txt"]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.txt"
    write_atomically(path, "old")

    def fail_halfway() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert path.read_text() == "old"
    assert files_in(tmp_path) == ["state.txt"]


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"name": "größer", "values": [1, 2.5, None]})
    assert read_json(path) == {"name": "größer", "values": [1, 2.5, None]}


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_json_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot read .*state\.json"):
        read_json(path)


def test_a_missing_json_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_json(tmp_path / "nothing.json")

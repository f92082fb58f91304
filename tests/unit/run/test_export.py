"""`doll export` to a place that cannot be written is one line, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.run.export import export_model
from job_files import job


def test_an_output_folder_below_a_file_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = job("task.class=no_such_module:Task")
    with pytest.raises(ConfigError, match=r"cannot write .*file/model: Not a directory"):
        export_model(config, tmp_path, tmp_path / "file" / "model")

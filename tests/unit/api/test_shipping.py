"""Tasks of notebooks, from the folder of a run."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.api.shipping import PICKLE, write_task
from doll.errors import ConfigError
from doll.task import pairs
from doll.task.base import Sample, Task


class _Decoding(Task):
    num_classes = 2

    def __init__(self, width: int = 1) -> None:
        self.width = width

    def decode(self, record: bytes) -> Sample:
        return Sample(np.full(self.width, float(record), np.float32), 1)


def _loaded(spec: str) -> type[Task]:
    path, _, name = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("shipped_task", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    cls = getattr(module, name)
    assert issubclass(cls, Task)
    return cls


def test_a_class_of_a_module_is_named(tmp_path: Path) -> None:
    assert write_task(tmp_path, _Decoding, are_pairs=False, held_out=None) == f"{__name__}:_Decoding"
    assert list(tmp_path.iterdir()) == []


def _x(sample: Any) -> Any:
    return np.asarray(sample.x).tolist()


def _notebook(code: str) -> dict[str, Any]:
    """What a notebook's cell leaves in `__main__`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    return names


def test_a_class_of_a_notebook_works_elsewhere_with_what_it_refers_to(tmp_path: Path) -> None:
    names = _notebook(
        """
import numpy
from doll.task.base import Sample, Task
scale = 3
class Net(Task):
    def decode(self, record):
        return Sample(numpy.float32(scale * float(record)), 0)
"""
    )
    spec = write_task(tmp_path, names["Net"], are_pairs=False, held_out=None)
    assert spec == f"{tmp_path}/task.py:Net"
    names["scale"] = 4  # the run has what was there when it began
    assert _x(_loaded(spec)().decode(b"2")) == 6.0
    assert stat.S_IMODE((tmp_path / PICKLE).stat().st_mode) == 0o600


def test_an_instance_keeps_its_attributes(tmp_path: Path) -> None:
    cls = _loaded(write_task(tmp_path, _Decoding(width=5), are_pairs=False, held_out=None))
    assert _x(cls().decode(b"2")) == [2.0] * 5


def test_pairs_need_no_decode_and_held_out_ones_take_the_place_of_the_class_s(tmp_path: Path) -> None:
    names = _notebook("from doll.task.base import Task\nclass Net(Task):\n    num_classes = 2\n")
    task = _loaded(write_task(tmp_path, names["Net"], are_pairs=True, held_out=[([1.0, 2.0], 1), ([3.0, 4.0], 0)]))()
    sample = task.decode(pairs.encode(np.ones(3, np.float32), 1))
    assert (_x(sample), task.num_classes) == ([1.0] * 3, 2)
    assert [_x(held) for held in task.holdout()] == [[1.0, 2.0], [3.0, 4.0]]


def test_own_decode_stays_beside_held_out_pairs(tmp_path: Path) -> None:
    task = _loaded(write_task(tmp_path, _Decoding, are_pairs=True, held_out=[([1.0], 0)]))()
    assert _x(task.decode(b"7")) == [7.0]
    assert len(list(task.holdout())) == 1


@pytest.mark.parametrize(
    ("task", "are_pairs", "held_out", "message"),
    [
        (int, True, None, "expected a subclass of doll.Task, or an instance of one, got int"),
        (Task, False, None, r"expected Task to define decode\(record\), or a source of pairs"),
        (_Decoding, False, [("a", 1)], "held_out: expected pairs"),
    ],
)
def test_what_is_no_task_is_refused(task: Any, are_pairs: bool, held_out: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_task(tmp_path, task, are_pairs=are_pairs, held_out=held_out)


def test_what_cannot_be_given_to_other_processes_is_refused(tmp_path: Path) -> None:
    task = _Decoding()
    task.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="_Decoding cannot be given to other processes: TypeError"):
        write_task(tmp_path, task, are_pairs=False, held_out=None)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes of files")
def test_a_file_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    spec = write_task(tmp_path, _Decoding(), are_pairs=False, held_out=None)
    os.chmod(tmp_path / PICKLE, 0o666)
    with pytest.raises(ConfigError, match="expected a file that its owner alone can write"):
        _loaded(spec)

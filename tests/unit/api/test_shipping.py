"""Tasks of notebooks, from the folder of a run."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from doll.api.items import items_of
from doll.api.shipping import PICKLE, write_task
from doll.errors import ConfigError, SkipRecord
from doll.task import pairs
from doll.task.base import Sample, Task
from doll.task.fields_task import Columns, JsonTask
from doll.task.records import Record


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


_CLASSES = """
import dataclasses, enum, typing
from typing import Annotated, ClassVar, Generic, Literal, NamedTuple, TypedDict, TypeVar, NotRequired
import msgspec, pydantic
from doll.task.base import Task

class Color(enum.Enum):
    RED = "red"

class Place(msgspec.Struct, frozen=True):
    x: float
    y: float = 0.5

@dataclasses.dataclass
class Tag:
    name: str
    notes: list[str] = dataclasses.field(default_factory=list)

class Pos(NamedTuple):
    a: float
    b: float = 2.0

class Extra(TypedDict):
    a: float
    c: NotRequired[int]

class Model(pydantic.BaseModel):
    a: float
    color: Color = Color.RED

class Base(msgspec.Struct, kw_only=True, rename="camel", tag_field="kind", tag="base", forbid_unknown_fields=True):
    user_id: int
    limit: ClassVar[int] = 3
    some_tags: list[str] = []

    def double(self):
        return twice(self.user_id)

class Event(Base, tag="event"):
    color: Color
    where: Place | None = None
    tag: Tag | None = None
    pos: Pos = Pos(1.0)
    extra: Extra | None = None
    share: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    letter: Literal["a", "b"] = "a"
    children: list["Event"] = []
    total: float = msgspec.field(default=0.0, name="sum")

    def __post_init__(self):
        if self.user_id < 0:
            raise ValueError("user_id below 0")

T = TypeVar("T")

class Page(msgspec.Struct, Generic[T]):
    item: T

def twice(number):
    return factor * number

factor = 2

class Net(Task):
    record = Event

    def decode(self, record):
        event = msgspec.json.decode(record, type=Event)
        page = msgspec.json.decode(b'{"item": {"x": 1}}', type=Page[Place])
        return event, event.double(), isinstance(event, Base), page, Model(a="3"), msgspec.json.encode(event)

records = [
    b'{"kind":"event","userId":3,"someTags":["q"],"color":"red","where":{"x":2},"tag":{"name":"n"},"pos":[4],"sum":7,'
    b'"extra":{"a":1},"letter":"b","children":[{"kind":"event","userId":1,"color":"red"}]}',
    b'{"kind":"event","userId":-3,"color":"red"}', b'{"kind":"event","userId":3,"color":"blue"}',
    b'{"kind":"event","color":"red"}', b'{"kind":"event","userId":3,"color":"red","more":1}',
    b'{"kind":"event","userId":3,"color":"red","share":-1}', b'{"kind":"base","userId":3,"color":"red"}',
]

def answers(task):
    for record in records:
        try:
            yield repr(task.decode(record))
        except msgspec.ValidationError as exc:
            yield str(exc)
"""

_READER = """
import msgspec
from task import Net
for record in {records!r}:
    try:
        print(Net().decode(record))
    except msgspec.ValidationError as exc:
        print(exc)
"""


@pytest.mark.slow  # it starts a process
@pytest.mark.parametrize("head", ["", "from __future__ import annotations\n"])
def test_classes_of_records_have_the_same_fields_elsewhere(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = ModuleType("__main__")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "__main__", notebook)
        exec(head + _CLASSES, notebook.__dict__)
        expected = list(notebook.answers(notebook.Net()))  # decoders have been used, as in a notebook
        write_task(tmp_path, notebook.Net, are_pairs=False, held_out=None)
    assert len({*expected}) == len(notebook.records)
    assert expected[0].startswith("(Event(color=<Color.RED: 'red'>, where=Place(x=2.0, y=0.5), tag=Tag(name='n', notes")
    read = subprocess.run(
        [sys.executable, "-c", _READER.format(records=notebook.records)],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )  # fmt: skip
    assert read.stdout.splitlines() == expected


def test_an_instance_keeps_its_attributes(tmp_path: Path) -> None:
    cls = _loaded(write_task(tmp_path, _Decoding(width=5), are_pairs=False, held_out=None))
    assert _x(cls().decode(b"2")) == [2.0] * 5


def test_pairs_need_no_decode_and_held_out_ones_take_the_place_of_the_class_s(tmp_path: Path) -> None:
    names = _notebook("from doll.task.base import Task\nclass Net(Task):\n    num_classes = 2\n")
    held_out = items_of([([1.0, 2.0], 1), ([3.0, 4.0], 0)])
    task = _loaded(write_task(tmp_path, names["Net"], are_pairs=True, held_out=held_out))()
    sample = task.decode(pairs.encode(np.ones(3, np.float32), 1))
    assert (_x(sample), task.num_classes) == ([1.0] * 3, 2)
    assert [_x(held) for held in task.holdout()] == [[1.0, 2.0], [3.0, 4.0]]


def test_own_decode_stays_beside_held_out_pairs(tmp_path: Path) -> None:
    task = _loaded(write_task(tmp_path, _Decoding, are_pairs=True, held_out=items_of([([1.0], 0)])))()
    assert _x(task.decode(b"7")) == [7.0]
    assert len(list(task.holdout())) == 1


class _Rides(JsonTask):
    record = msgspec.defstruct("Ride", [("km", float), ("fare", float)])

    def samples(self, columns: Columns) -> tuple[Any, Any]:
        return columns["km"], columns["fare"]

    def decode_record(self, record: Record) -> Sample | list[Sample]:
        if record.value == b'{"km":0.0,"fare":0.0}':
            raise SkipRecord("it did not move")
        return super().decode_record(record)


def test_held_out_records_are_decoded_as_those_of_the_stream(tmp_path: Path) -> None:
    rides = [{"km": 1.5, "fare": 7.0}, {"km": 0.0, "fare": 0.0}, {"km": 2.0, "fare": 9.0}]
    task = _loaded(write_task(tmp_path, _Rides, are_pairs=False, held_out=items_of(rides, "held_out")))()
    assert [(float(sample.x), float(sample.y)) for sample in task.holdout()] == [(1.5, 7.0), (2.0, 9.0)]


@pytest.mark.parametrize(
    ("task", "are_pairs", "held_out", "message"),
    [
        (int, True, None, "expected a subclass of doll.Task, or an instance of one, got int"),
        (Task, False, None, r"expected Task to define decode\(record\), or a source of pairs"),
        (
            Task,
            True,
            items_of([{"a": 1}]),
            r"held_out: expected pairs \(x, y\), as the source has, since Task does not",
        ),
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

"""What tasks on text share: vocabularies, decoding, held-out texts, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doll import config as job_config
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import BadRecordsError, ConfigError, SampleError
from doll.model.flat_model import build, fingerprint
from doll.producers import sources
from doll.task.base import Task, load_task
from doll.task.text import ENGLISH, TextTask, Vocabulary
from examples.lda.task import Topics
from examples.words.task import SkipGram
from hypothesis import example, given
from hypothesis import strategies as st
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch


def _record(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


# --- vocabulary ----------------------------------------------------------------------------------------------------


def test_hashed_ids_are_the_same_in_another_process() -> None:
    words = ["cocoa", "größe", "東京"]
    code = f"import sys; from doll.task.text import Vocabulary; sys.stdout.write(str(Vocabulary(500).ids({words!r})))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there == str(Vocabulary(500).ids(words)) == str([zlib.crc32(word.encode()) % 500 for word in words])


def test_a_file_gives_each_token_its_line(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text("cocoa 7\n\nsugar 3\n", encoding="utf-8")
    vocabulary = Vocabulary.from_file(path)
    assert vocabulary.size == 2
    assert vocabulary.ids(["sugar", "tea", "cocoa", "sugar"]) == [1, 0, 1]
    assert vocabulary.counts is not None
    assert vocabulary.counts.tolist() == [7, 3]
    path.write_text("cocoa\nsugar\n")
    assert Vocabulary.from_file(path).counts is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected at least one line"),
        (b"cocoa\nTea\n", r"line 2: expected a token \(letters in lower case\), .* got b'Tea'"),
        (b"two-words\n", "line 1: expected a token"),
        (b"cocoa 1 2\n", "line 1: expected a token"),
        (b"cocoa many\n", "line 1: expected a token"),
        (b"cocoa 0\n", "line 1: expected a token"),
        (b"caf\xe9\n", "line 1: expected a token"),
        (b" \n", "line 1: expected a token"),
        (b"cocoa\ntea\ncocoa\n", "line 3: 'cocoa' is also in line 1"),
        (b"cocoa 1\ntea\n", "expected counts in all lines or in none, got 1 in 2 lines"),
    ],
)
def test_a_bad_vocabulary_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Vocabulary.from_file(path)


@pytest.mark.parametrize("cls", [Topics, SkipGram])
def test_processes_with_other_vocabularies_are_told_apart(tmp_path: Path, cls: type[TextTask]) -> None:
    def made(words: str) -> tuple[str, int]:
        (tmp_path / "v.txt").write_text(words)
        text = (
            "job: t\ntraining: {policy: {name: ssp}}\n"
            f"task: {{class: '{cls.__module__}:{cls.__name__}', args: {{vocabulary_file: v.txt}}}}"
        )
        config = job_config.parse(text, base_folder=tmp_path)
        model = build(config, load_task(config))
        return fingerprint(config, model), model.flat.numel()

    assert made("tea\ncocoa\n") == made("tea\ncocoa\n")
    one, other = made("tea\ncocoa\n"), made("cocoa\ntea\n")
    assert one[1] == other[1]  # the checksum is not published
    assert one[0] != other[0]


# --- decoding ------------------------------------------------------------------------------------------------------


def test_a_text_becomes_padded_ids_without_stop_words(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("the\nprice\nof\ncocoa\n")
    task = TextTask(vocabulary_file=str(tmp_path / "v.txt"), max_tokens=6, stop_words=["of"])
    x, y, *_ = task.decode(_record("The price of Swiss cocoa: 7!"))
    assert np.asarray(x).tolist() == [0, 1, 3, -1, -1, -1]
    assert y == 3
    assert np.asarray(task.decode(_record("")).x).tolist() == [-1] * 6


def test_english_leaves_what_a_text_is_about() -> None:
    task = TextTask(vocabulary_size=1 << 30, stop_words="english")
    assert task.decode(_record("don't you think that the price of cocoa will fall?")).y == 4
    assert {"the", "t", "of"} < ENGLISH


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"no json", "expected a JSON object with a text in \"text\": .* in b'no json'"),
        (b"", "expected a JSON object"),
        (b'["text"]', "expected a JSON object"),
        (b'{"body": "a"}', "missing required field"),
        (b'{"text": 7}', "Expected `str`, got `int`"),
        (b'{"text": "caf\xe9"}', "expected a JSON object"),
        (b"[" * 5000, "expected a JSON object"),
        (_record("a b c d e f g"), r"expected at most 6 tokens \(max_tokens of the task\), got 7"),
    ],
)
def test_a_record_that_is_no_text_is_refused(record: bytes, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        TextTask(vocabulary_size=9, max_tokens=6).decode(record)


_records = st.one_of(
    st.text(max_size=30).map(_record),
    st.lists(st.sampled_from(["tea", "the", "Cocoa"]), max_size=8).map(lambda words: _record(" ".join(words))),
    st.sampled_from([b"x", b'{"text": 1}', b"", _record("a " * 9)]),
)


@given(values=st.lists(_records, min_size=1, max_size=30))
@example(values=[_record("")])
def test_many_texts_decode_as_one_by_one(values: list[bytes]) -> None:
    class Slow(TextTask):
        decode_many = Task.decode_many  # type: ignore[assignment]

    many, single = (
        decode_records(
            cls(vocabulary_size=50, max_tokens=6, stop_words=["the"]), RawRecords(range(len(values)), values),
            samples_per_record=1, max_record_bytes=9999,
        ) for cls in (TextTask, Slow)
    )  # fmt: skip
    assert many.refused == single.refused
    assert (many.x.dtype, many.y.dtype, many.x.shape) == (single.x.dtype, single.y.dtype, single.x.shape)
    assert (many.x.tobytes(), many.y.tobytes()) == (single.x.tobytes(), single.y.tobytes())


def test_many_texts_are_decoded_in_one_call_that_names_the_bad_ones() -> None:
    task = TextTask(vocabulary_size=50, max_tokens=6)
    values = [_record("tea and cocoa"), _record("rum")]
    x, y = task.decode_many(values)
    slow_x, slow_y = stack(map(task.decode, values))
    assert (x == slow_x).all()
    assert (y == slow_y).all()
    with pytest.raises(BadRecordsError) as refused:
        task.decode_many([*values, b"x", values[0], _record("a " * 7)])
    assert refused.value.positions == (2, 4)


def test_texts_with_numbers_have_them_as_targets() -> None:
    task = TextTask(vocabulary_size=50, max_tokens=6, texts=8)
    values = [b'{"text": "tea", "number": 7}', b'{"number": 0, "text": ""}']
    assert [task.decode(value).y for value in values] == [7, 0]
    assert task.decode_many(values)[1].tolist() == [7, 0]
    bad = [_record("tea"), b'{"text": "tea", "number": 8}', b'{"text": "tea", "number": -2}']
    for value, got in zip(bad, ("none", "8", "-2"), strict=True):
        with pytest.raises(SampleError, match=rf'expected a "number" of 0 to 7 \(texts of the task\), got {got}'):
            task.decode(value)
    with pytest.raises(BadRecordsError) as refused:
        task.decode_many([values[0], *bad])
    assert refused.value.positions == (1, 2, 3)


# --- arguments and held-out texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"vocabulary_size": 5, "vocabulary_file": "v"}, {"vocabulary_size": 0}, {"stop_words": "german"},
        {"max_tokens": 0}, {"texts": -1}, {"holdout_path": "d"}, {"holdout_lines": 5}, {"fields": "body"},
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        TextTask(**({"vocabulary_size": 9} | arguments if arguments else {}))


@pytest.mark.parametrize("build_task", [
    lambda: Topics(0, vocabulary_size=9), lambda: Topics(alpha=0.0, vocabulary_size=9),
    lambda: Topics(beta=float("nan"), vocabulary_size=9), lambda: Topics(sweeps=0, vocabulary_size=9),
    lambda: SkipGram(0, vocabulary_size=9), lambda: SkipGram(window=0, vocabulary_size=9),
    lambda: SkipGram(subsample=-1.0, vocabulary_size=9),
])  # fmt: skip
def test_bad_arguments_of_the_tasks_are_refused(build_task: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        build_task()


def test_held_out_texts_are_the_lines_that_the_stream_skips(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("".join(f'{{"body": "{word} {word} {word}"}}\n' for word in ("a", "b", "c", "d")))
    text = (
        "job: t\ndata: {workers: 1}\n"
        "source: {kind: text, path: d.jsonl, fields: [body], skip: 2, tokens_per_record: 2}\n"
        "task: {class: 'examples.lda.task:Topics', args: {vocabulary_size: 999, max_tokens: 2, fields: [body], "
        "holdout_path: d.jsonl, holdout_lines: 2}}"
    )
    config = job_config.parse(text, base_folder=tmp_path)
    task = load_task(config)
    assert isinstance(task, Topics)
    held_out = [np.asarray(sample.x).tolist() for sample in task.holdout()]
    (a,), (b,) = task.vocabulary.ids(["a"]), task.vocabulary.ids(["b"])
    assert held_out == [[a, -1], [a, a], [b, -1], [b, b]]
    streamed = [json.loads(record)["text"] for record in sources.open_streams(config, [0])[0]]
    assert streamed == ["c", "c c", "d", "d d"]
    assert list(Topics(vocabulary_size=9).holdout()) == []


def test_a_text_task_does_not_load_torch_to_decode() -> None:
    code = (
        "import sys; from doll import TextTask;"
        'TextTask(vocabulary_size=9).decode(b\'{"text": "a b"}\');'
        "sys.exit(str([m for m in ('torch', 'sklearn', 'scipy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_both_models_build_the_same_from_one_seed() -> None:
    for task in (Topics(3, vocabulary_size=9), SkipGram(4, vocabulary_size=9)):
        built = []
        for _ in range(2):
            torch.manual_seed(5)
            built.append(torch.nn.utils.parameters_to_vector(task.build_model().parameters()))
        assert torch.equal(built[0], built[1])

"""Skip-gram with negative sampling: the loss by loops, equal replays, touched rows, groups that are found."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll import config as job_config
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.guard import Guard
from doll.model.flat_model import FlatModel
from doll.producers import sources
from doll.tables.embedding_tables import EmbeddingTables
from examples.words.task import SkipGram
from paths import SHARED_DATA

pytestmark = pytest.mark.slow  # loads torch


def _task(**arguments: Any) -> SkipGram:
    return SkipGram(
        **({"dimensions": 4, "vocabulary_size": 30, "max_tokens": 12, "subsample": 0.0, "sparse": False} | arguments)
    )


def _texts(count: int, seed: int = 0, words: int = 30) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 13, (count, 1))
    return np.where(np.arange(12) < lengths, rng.integers(words, size=(count, 12)), -1).astype(np.int32)


def _model(task: SkipGram, seed: int = 0) -> FlatModel:
    """A model without zeros."""
    torch.manual_seed(seed)
    model = FlatModel(task.build_model())
    model.load_weights(np.random.default_rng(seed).normal(size=model.flat.numel()).astype(np.float32))
    return model


def _loss(task: SkipGram, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return task.loss(task.forward(model, x), torch.zeros(len(x)))


def _loss_by_loops(task: SkipGram, model: FlatModel, x: npt.NDArray[np.int32], noise: npt.NDArray[np.int64]) -> float:
    v, u = (model.module.get_parameter(f"{name}.weight").detach().double() for name in ("words", "contexts"))

    def log_sigmoid(z: torch.Tensor) -> float:
        return -math.log1p(math.exp(-float(z)))

    total = weights = 0.0
    drawn = iter(noise)
    for row in x:
        text = [int(token) for token in row if token >= 0]
        for place, center in enumerate(text):
            negative = sum(log_sigmoid(-(v[center] @ u[int(word)])) for word in next(drawn))
            for other, context in enumerate(text):
                distance = abs(other - place)
                if 0 < distance <= task.window:
                    weight = (task.window - distance + 1) / task.window
                    total -= weight * (log_sigmoid(v[center] @ u[context]) + negative)
                    weights += weight
    return total / weights


# --- the loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 20])
def test_the_loss_is_equation_4_over_the_pairs_of_each_text(window: int) -> None:
    task, x = _task(window=window, negatives=3), _texts(7)
    model = _model(task)
    with torch.no_grad():
        output = task.forward(model.module, torch.from_numpy(x))
    assert float(task.loss(output, torch.zeros(7))) == pytest.approx(
        _loss_by_loops(task, model, x, task.draw(x).noise), rel=1e-5
    )


def test_before_learning_each_pair_costs_log_2_for_each_word() -> None:
    task, x = _task(negatives=5), _texts(5)
    with torch.no_grad():
        output = task.forward(task.build_model(), torch.from_numpy(x))
    assert float(task.loss(output, torch.zeros(5))) == pytest.approx(6 * math.log(2))


@pytest.mark.parametrize("text", [[-1] * 12, [3] + [-1] * 11])
def test_texts_without_a_pair_have_no_loss_and_no_gradient(text: list[int]) -> None:
    task = _task()
    gradient = GradientComputer(task, _model(task)).compute(np.array([text, text], np.int32), np.zeros(2))
    assert gradient.problem() == ""
    assert gradient.loss_sum == 0.0
    assert gradient.norm == 0.0


def test_a_text_does_not_see_the_words_of_its_neighbours() -> None:
    task = _task(window=3, negatives=1)
    model = _model(task)
    x = np.full((2, 12), -1, np.int32)
    x[0, :2], x[1, :2] = (0, 1), (2, 3)
    with torch.no_grad():
        pairs = task.forward(model.module, torch.from_numpy(x))[:, 1]
    assert pairs.tolist() == [2.0, 2.0]  # two tokens at distance 1, both ways


# --- what is drawn -------------------------------------------------------------------------------------------------


def test_a_batch_that_is_computed_again_has_the_same_gradient_to_the_bit() -> None:
    x = _texts(20)
    gradients = [
        GradientComputer(task, _model(task)).compute(x, np.zeros(20)).values.copy()
        for task in (_task(subsample=0.01), _task(subsample=0.01), _task(subsample=0.01, seed=1))
    ]
    assert gradients[0].tobytes() == gradients[1].tobytes()
    assert gradients[0].tobytes() != gradients[2].tobytes()


def test_a_worker_has_no_memory_of_other_batches() -> None:
    task, x = _task(), _texts(20)
    computer = GradientComputer(task, _model(task))
    first = computer.compute(x, np.zeros(20)).values.copy()
    computer.compute(_texts(20, seed=1), np.zeros(20))
    assert computer.compute(x, np.zeros(20)).values.tobytes() == first.tobytes()


def test_noise_is_drawn_by_counts_to_the_power_of_three_quarters() -> None:
    x = np.full((100, 200), -1, np.int32)
    x[:, :100] = np.repeat([7, 8], [80, 20])  # the batch has no other word
    noise = _task(max_tokens=200).draw(x).noise
    assert set(np.unique(noise)) == {7, 8}
    expected = 0.8**0.75 / (0.8**0.75 + 0.2**0.75)
    assert (noise == 7).mean() == pytest.approx(expected, abs=0.01)  # 50,000 draws: 0.002 a deviation; 0.8 by counts


def test_a_vocabulary_with_counts_is_the_table_of_noise(tmp_path: Any) -> None:
    (tmp_path / "v.txt").write_text("tea 80\ncocoa 20\nrum 100\n")
    task = _task(vocabulary_size=None, vocabulary_file=str(tmp_path / "v.txt"))
    noise = task.draw(np.zeros((500, 12), np.int32)).noise
    weights = np.array([80, 20, 100]) ** 0.75
    np.testing.assert_allclose(np.bincount(noise.ravel()) / noise.size, weights / weights.sum(), atol=0.01)


def test_frequent_words_are_left_out_by_their_share() -> None:
    x = np.full((100, 200), -1, np.int32)
    x[:, :100] = np.repeat([7, 8], [90, 10])
    ids = _task(subsample=0.1, max_tokens=200).draw(x).ids
    assert (ids == 8).sum() == 1000  # a share of 0.1 is kept
    kept = 0.1 / 0.9 + math.sqrt(0.1 / 0.9)
    assert (ids == 7).sum() == pytest.approx(9000 * kept, rel=0.05)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_sparse_tables_have_the_gradient_of_dense_ones() -> None:
    x = torch.from_numpy(_texts(20))
    grads = []
    for sparse in (False, True):
        task = _task(sparse=sparse)
        torch.manual_seed(0)
        model = task.build_model()
        torch.nn.init.normal_(model.get_parameter("contexts.weight"))
        task.loss(task.forward(model, x), torch.zeros(20)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for dense, rows in zip(*grads, strict=True):
        assert dense is not None
        assert rows is not None
        assert rows.is_sparse
        torch.testing.assert_close(rows.to_dense(), dense)


def test_rows_that_are_looked_up_have_the_gradient_of_dense_tables() -> None:
    x = torch.from_numpy(_texts(20))
    dense = _model(_task()).module
    _loss(_task(), dense, x).backward()
    model = _task(sparse=True).build_model()
    model.load_state_dict(dense.state_dict())
    tables, asked = EmbeddingTables(model), list[str]()
    rows = tables.take_initial()

    def look_up(name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        asked.append(name)
        return rows[name][ids]

    tables.connect(look_up)
    _loss(_task(), model, x).backward()
    assert asked == ["words.weight", "contexts.weight"]
    for name, got in tables.gradients().items():
        expected = dense.get_parameter(name).grad
        assert expected is not None
        np.testing.assert_allclose(got.values, expected.numpy()[got.ids], rtol=1e-5, atol=1e-6)
        assert not np.delete(expected.numpy(), got.ids, axis=0).any()


def test_only_rows_of_the_batchs_words_are_touched() -> None:
    x = _texts(20, words=10)
    task = _task(sparse=True)
    model = task.build_model()
    task.loss(task.forward(model, torch.from_numpy(x)), torch.zeros(20)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert set(parameter.grad.coalesce().indices().ravel().tolist()) <= set(range(10))


# --- learning ------------------------------------------------------------------------------------------------------


def _groups(count: int, rng: np.random.Generator, groups: int = 4, words: int = 8) -> list[bytes]:
    """Texts whose words are all of one group, and one word in four of a group for all."""
    records = []
    for _ in range(count):
        first = words * rng.integers(groups)
        own, common = first + rng.integers(words, size=16), groups * words + rng.integers(words, size=16)
        text = np.where(rng.random(16) < 0.25, common, own)
        records.append(json.dumps({"text": " ".join(chr(97 + n // 26) + chr(97 + n % 26) for n in text)}).encode())
    return records


def test_nearest_neighbours_are_of_the_same_group(tmp_path: Any) -> None:
    (tmp_path / "v.txt").write_text("".join(f"{chr(97 + n // 26)}{chr(97 + n % 26)}\n" for n in range(40)))
    task = _task(dimensions=16, vocabulary_size=None, vocabulary_file=str(tmp_path / "v.txt"), max_tokens=16)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.02)
    x, _ = task.decode_many(_groups(3000, np.random.default_rng(0)))
    for first in range(0, len(x), 25):
        optimizer.zero_grad()
        task.loss(task.forward(model, torch.from_numpy(x[first : first + 25])), torch.zeros(25)).backward()
        optimizer.step()
    vectors = model.get_parameter("words.weight").detach().numpy()[:32]  # those of the four groups
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = np.argsort(-(vectors @ vectors.T), axis=1)[:, 1:8]  # each word has seven others in its group
    assert (near // 8 == np.arange(32)[:, None] // 8).mean() > 0.99


def test_no_batch_of_real_text_is_refused_by_the_guard() -> None:
    path = SHARED_DATA / "reuters21578/docs.jsonl.gz"
    if not path.is_file():
        pytest.skip("needs the Reuters-21578 file in ../shared/data")
    config = job_config.parse(
        "job: t\ndata: {workers: 1}\ntask: {class: 'examples.words.task:SkipGram'}\n"
        "training: {optimizer: {name: adam, lr: 0.01}}\n"
        f"source: {{kind: text, path: '{path.resolve()}', fields: [title, body]}}"
    )
    task = SkipGram(vocabulary_size=4096, sparse=False)
    torch.manual_seed(0)
    model = FlatModel(task.build_model())
    parameter = torch.nn.Parameter(model.flat)
    optimizer = torch.optim.Adam([parameter], 0.01)
    guard = Guard(config, task, GradientComputer(task, model))
    x, y = task.decode_many(list(itertools.islice(sources.open_streams(config, [0])[0], 1600)))
    losses = []
    for first in range(0, len(x), 32):
        gradient, bad = guard.compute(x[first : first + 32], y[first : first + 32])
        assert bad == {}
        assert gradient is not None
        parameter.grad = torch.from_numpy(gradient.values / 32)
        optimizer.step()
        losses.append(gradient.loss_sum / 32)
    assert np.mean(losses[-5:]) < 0.9 * losses[0]

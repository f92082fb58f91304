"""The worker's computation on another device than the one whose memory arrays are in.

`cpu:0` is such a device for DOLL: its tensors are others than those in the machine's memory. Where the machine has a
GPU, the same tests run on it.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import AdamConfig, SgdConfig, TorchConfig, TrainingConfig
from doll.consumers.compute.gradient import ForwardPasses, Gradient, GradientComputer, GradientSum
from doll.errors import ConfigError
from doll.model.devices import resolve
from doll.model.flat_model import FlatModel
from doll.model.random_numbers import draw_from
from doll.optim.recipe import make_optimizer
from doll.tables.embedding_tables import EmbeddingTables
from doll.task.base import Sample, Task
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch
DEVICES = ["cpu:0", *(["cuda:0"] if torch.cuda.is_available() else [])]


class Classes(Task):
    num_classes = 3

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


def normed() -> torch.nn.Module:
    torch.manual_seed(0)
    # A bias before the normalisation would have a gradient of rounding errors alone, which Adam makes long steps of.
    return torch.nn.Sequential(torch.nn.Linear(5, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


def on(device: str, module: torch.nn.Module, **more: Any) -> tuple[FlatModel, GradientComputer]:
    module = copy.deepcopy(module).to(device)
    model = FlatModel(module, device=device)
    return model, GradientComputer(Classes(), model, ForwardPasses(module, device, **more))


def data(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, 3, n)


def assert_alike(device: str, got: np.ndarray, expected: np.ndarray) -> None:
    if device.startswith("cpu"):
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    else:
        counters = slice(-2, None)  # the bytes of num_batches_tracked
        np.testing.assert_array_equal(got[counters].view(np.uint32), expected[counters].view(np.uint32))
        np.testing.assert_allclose(got[:-2], expected[:-2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_is_that_of_the_cpu_and_the_replica_stays_as_it_is(device: str) -> None:
    _, here = on("cpu", normed())
    model, there = on(device, normed())
    assert model.flat.data_ptr() != model.host.data_ptr()
    before = there.weights.copy()
    for seed in range(3):
        x, y = data(8, seed)
        expected, got = here.compute(x, y), there.compute(x, y)
        assert_alike(device, got.values, expected.values)
        assert got.loss_sum == pytest.approx(expected.loss_sum, rel=1e-4)
        assert got.buffer_change == pytest.approx(expected.buffer_change, rel=1e-3)
        assert there.loss(x, y) == pytest.approx(here.loss(x, y), rel=1e-4)
    np.testing.assert_array_equal(there.weights.view(np.uint32), before.view(np.uint32))
    np.testing.assert_array_equal(model.flat.detach().cpu().numpy().view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_caller_changes_in_the_weights_is_there_in_the_next_pass(device: str) -> None:
    _, here = on("cpu", normed())
    _, there = on(device, normed())
    x, y = data(8)
    there.compute(x, y)
    for computer in (here, there):
        computer.weights[:20] += 0.25
    assert_alike(device, there.compute(x, y).values, here.compute(x, y).values)
    gradient = there.kept(there.compute(x, y))
    with there.stepped_by(gradient, -0.1):
        after = there.loss(x, y)
    assert after < there.loss(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_is_made_on_the_device_also_of_a_gradient_that_the_guard_has_kept(device: str) -> None:
    def total(name: str) -> np.ndarray:
        _, computer = on(name, normed())
        total = computer.new_sum()
        assert isinstance(total, GradientSum)
        total.begin(grant(first=0))
        for batch in range(4):
            gradient: Gradient = computer.compute(*data(8, batch))
            total.add(computer.kept(gradient) if batch % 2 else gradient, batch=batch)
            total.keep()
        values = total.values()
        assert values is not None
        return values

    assert_alike(device, total(device), total("cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_copied_to_the_machines_memory_into_the_same_place(device: str) -> None:
    model, computer = on(device, normed())
    _, here = on("cpu", normed())
    first = computer.compute(*data(8, 0)).values
    kept = computer.kept(computer.compute(*data(8, 1)))
    second = computer.compute(*data(8, 2)).values
    assert second.ctypes.data == first.ctypes.data  # memory that is page-locked where the device is a GPU
    assert model.to_host(model.grad).is_pinned() == device.startswith("cuda")
    assert_alike(device, second, here.compute(*data(8, 2)).values)
    assert_alike(device, kept.values, here.compute(*data(8, 1)).values)


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_the_seed_of_a_batch_decides_what_the_device_draws(device: str) -> None:
    def drawn() -> list[float]:
        there, here = torch.rand(3, device=device), torch.rand(3)
        return [*there.tolist(), *here.tolist(), np.random.rand(), random.random()]

    draw_from(1 << 62, device)
    first = drawn()
    draw_from(1 << 62, device)
    assert drawn() == first
    draw_from(3, device)
    assert all(now != before for now, before in zip(drawn(), first, strict=True))
    torch.manual_seed(1 << 62)  # which seeds all devices, and takes a hundred times as long
    assert torch.rand(3, device=device).tolist() == first[:3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "config", [SgdConfig(lr=0.1, momentum=0.9), AdamConfig(lr=0.01), TorchConfig(cls="torch.optim.AdamW")]
)
def test_a_worker_that_steps_itself_does_so_in_the_machines_memory(device: str, config: Any) -> None:
    def weights_after(name: str) -> np.ndarray:
        model, computer = on(name, normed())
        optimizer = make_optimizer(TrainingConfig(optimizer=config), model)
        for batch in range(4):
            x, y = data(8, batch)
            gradient = computer.compute(x, y)
            weights = computer.weights  # which the optimizer changes
            optimizer.apply([gradient.values], 1 / 8, 8)
        return weights.copy()

    assert_alike(device, weights_after(device), weights_after("cpu"))


class Words(Classes):
    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x.long())
        return output


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_tables_are_used_on_the_device(device: str) -> None:
    rows = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)

    def computed(name: str) -> Gradient:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 3, sparse=True), torch.nn.Linear(3, 3))
        tables = EmbeddingTables(module)
        tables.connect(lambda table, ids: rows[ids])
        return GradientComputer(Words(), FlatModel(module.to(name), tables, device=name)).compute(
            np.random.default_rng(0).integers(0, 50, (8, 4)), data(8)[1]
        )

    expected, got = computed("cpu"), computed(device)
    np.testing.assert_allclose(got.values, expected.values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got.rows["0.weight"].ids, expected.rows["0.weight"].ids)
    np.testing.assert_allclose(got.rows["0.weight"].values, expected.rows["0.weight"].values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_of_the_passes_and_gradients_stay_float32(device: str) -> None:
    _, exact = on("cpu", normed())
    _, computer = on(device, normed(), precision="bf16")
    x, y = data(64)
    expected, got = exact.compute(x, y), computer.compute(x, y)
    assert got.vector.dtype is torch.float32
    difference = np.linalg.norm(got.values[:-2] - expected.values[:-2]) / np.linalg.norm(expected.values[:-2])
    assert 0 < difference < 0.05


def test_where_compiled_code_fails_the_worker_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compiled(module: torch.nn.Module) -> Any:
        def fail(x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            raise RuntimeError("no compiler on this machine")

        return fail

    monkeypatch.setattr(torch, "compile", compiled)
    _, plain = on("cpu", normed())
    _, computer = on("cpu", normed(), compiles=True)
    for seed in range(2):
        x, y = data(8, seed)
        np.testing.assert_array_equal(computer.compute(x, y).values, plain.compute(x, y).values)
    assert calls == [8], "compiled code is not tried again"


class Counting(torch.nn.Module):
    """Its code replaces a buffer instead of changing it."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = normed()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.mean()
        return self.inner(x)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_move_once_where_compiled_code_fails_after_it_has_moved_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compiled(module: torch.nn.Module) -> Any:
        def fail(x: torch.Tensor) -> torch.Tensor:
            calls.append(module(x))
            raise RuntimeError("the second graph does not compile")

        return fail

    monkeypatch.setattr(torch, "compile", compiled)
    _, plain = on(device, Counting())
    model, computer = on(device, Counting(), compiles=True)
    before = computer.weights.copy()
    x, y = data(8)
    expected, got = plain.compute(x, y), computer.compute(x, y)
    assert len(calls) == 1
    np.testing.assert_array_equal(got.values.view(np.uint32), expected.values.view(np.uint32))
    assert got.buffer_change == expected.buffer_change > 0
    np.testing.assert_array_equal(model.flat.detach().cpu().numpy().view(np.uint32), before.view(np.uint32))


def test_what_fails_compiled_or_not_is_the_tasks_fault_and_compiled_code_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module: module)
    _, computer = on("cpu", normed(), compiles=True)
    with pytest.raises(RuntimeError, match="shapes"):
        computer.compute(np.zeros((4, 7), np.float32), np.zeros(4, np.int64))
    x, y = data(8)
    assert computer.compute(x, y).loss_sum > 0
    assert computer._passes._compiled is not None


@pytest.mark.parametrize(
    ("setting", "worker", "expected"),
    [
        ("cpu", 3, "cpu"), ("auto", 0, "cuda:0"), ("auto", 5, "cuda:1"), ("cuda", 3, "cuda:1"), ("cuda:1", 0, "cuda:1"),
    ],
)  # fmt: skip
def test_workers_are_spread_over_the_devices(
    setting: str, worker: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve(setting, worker) == expected


@pytest.mark.parametrize(
    ("setting", "count", "said"),
    [
        ("cuda", 0, r"expected a device of this machine \(cpu\), got 'cuda'"),
        ("cuda:2", 2, r"expected a device of this machine \(cpu, cuda:0, cuda:1\), got 'cuda:2'"),
        ("mps", 1, r"expected a device of this machine \(cpu, cuda:0\), got 'mps'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    setting: str, count: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"worker.device: {said}"):
        resolve(setting, 0)


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve("auto", 4) == "cpu"

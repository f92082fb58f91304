"""Test a `Task` without a job: check that it provides what a worker, the server and `doll serve` need.

from doll.testing import check_task

def test_churn():
    check_task(Churn(), records=[b'{"age": 31, ...}', ...], refused=[b"", b"no json"])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from doll.consumers.intake.decoding import DecodedBatch, RawRecords, decode_records
from doll.errors import SampleError
from doll.model.flat_model import check_tensors
from doll.task import passes, trees
from doll.task.base import Task, described
from doll.task.batches import SampleBatch

_MAX_RECORD_BYTES = 2**31


@dataclass(frozen=True)
class TaskReport:
    """The result of `check_task`.

    Attributes:
        samples: number of samples that were decoded from the records.
        parameters: number of trained parameters (scalars) of the model.
        first_loss, last_loss: mean loss over all samples before the first step and after the last step.
    """

    samples: int
    parameters: int
    first_loss: float
    last_loss: float
    reasons: tuple[str, ...]


def check_task(
    task: Task, records: Sequence[bytes], *, refused: Sequence[bytes] = (), lr: float = 0.1, steps: int = 50,
    batch_size: int = 64, seed: int = 0,
) -> TaskReport:  # fmt: skip
    """Check that a task decodes, refuses, builds, learns and predicts as DOLL expects.

    1. Each of `records` is decoded; decoding in bulk gives the same arrays as decoding one by one.
    2. Each of `refused` is refused, also between two good records; the good records are kept.
    3. Two calls of `build_model` give the same model, and DOLL can train its tensors. A copy by `state_dict` gives the
       same output, so an exported model is complete.
    4. After `steps` steps of SGD with `lr`, the mean loss over the samples is lower.
    5. `decode_features` and `predict` return an answer for the first record.

    Args:
        records: values of Kafka records that the task must accept; at least two.
        refused: values that the task must refuse.
        batch_size: number of samples of a step. The samples are used in order, repeatedly.

    Raises:
        AssertionError: a check failed; the message states the expected and the actual result.
    """
    if len(records) < 2:
        raise ValueError(f"expected at least two records, got {len(records)}")
    decoded = _decoded_alike(task, records)
    reasons = tuple(_refused(task, record, records) for record in refused)
    samples = decoded.samples
    first, second = _built(task, seed), _built(task, seed)
    _assert_same_output(task, first, second, samples, "build_model() with the same seed gives another model")
    first_loss = _mean_loss(task, first, samples)
    if not task.defines_step:
        _learn(task, first, samples, lr, steps, batch_size)
    last_loss = _mean_loss(task, first, samples)
    if not task.defines_step and not last_loss < first_loss:
        raise AssertionError(
            f"expected {steps} steps with lr={lr:g} to lower the mean loss over {decoded.num_samples} samples, got "
            f"{first_loss:.4g} before and {last_loss:.4g} after them: try another lr, and look at loss()"
        )
    second.load_state_dict(first.state_dict())
    _assert_same_output(task, first, second, samples, "a copy by state_dict() gives another output: a value is missing")
    _predict(task, first, records[0])
    parameters = sum(tensor.numel() for tensor in first.parameters() if tensor.requires_grad)
    return TaskReport(decoded.num_samples, parameters, first_loss, last_loss, reasons)


def _decoded_alike(task: Task, records: Sequence[bytes]) -> DecodedBatch:
    """Return the samples of all records, decoded in bulk. Raise AssertionError if decoding one by one differs."""
    bulk = _decode(task, records)
    for problem in bulk.refused[:1]:
        raise AssertionError(f"expected record {problem.offset} to be taken, it is refused: {problem.reason}")
    # The slow path is set on the instance: a subclass would have another name, and another __init__.
    fast = {name: vars(task).get(name) for name in ("decode_block", "decode_many")}
    vars(task).update(dict.fromkeys(fast, lambda *_: None))
    try:
        single = _decode(task, records)
    finally:
        for name, method in fast.items():
            vars(task).pop(name)
            if method is not None:
                setattr(task, name, method)
    for problem in single.refused[:1]:
        raise AssertionError(f"record {problem.offset} is taken in bulk, and alone it is refused: {problem.reason}")
    if bulk.offsets.tolist() != single.offsets.tolist():
        raise AssertionError(
            f"expected as many samples in bulk as one by one, got {bulk.num_samples} and {single.num_samples}"
        )
    for name in ("x", "y", "weight", "group"):
        for fast_array, slow_array in zip(_arrays(task, bulk, name), _arrays(task, single, name), strict=True):
            if fast_array.dtype != slow_array.dtype or not np.array_equal(fast_array, slow_array):
                raise AssertionError(
                    f"expected the same {name} in bulk as one by one, got {fast_array.dtype} {fast_array.shape} and "
                    f"{slow_array.dtype} {slow_array.shape}, or other values: compare decode_many() with decode()"
                )
    return bulk


def _arrays(task: Task, decoded: DecodedBatch, name: str) -> list[Any]:
    value = getattr(passes.inputs_of(task, decoded.samples), name)
    return [] if value is None else [np.asarray(leaf) for leaf in trees.flat(value)[0]]


def _decode(task: Task, records: Sequence[bytes]) -> DecodedBatch:
    return decode_records(
        task, RawRecords(range(len(records)), list(records)), samples_per_record=1, max_record_bytes=_MAX_RECORD_BYTES
    )


def _refused(task: Task, record: bytes, good: Sequence[bytes]) -> str:
    """Return the reason why `record` is refused if it is between two good records."""
    decoded = _decode(task, [good[0], record, good[1]])
    at = [problem.offset for problem in decoded.refused]
    if at != [1] or {*decoded.offsets.tolist()} != {0, 2}:
        raise AssertionError(
            f"expected {record[:60]!r} to be refused, and no record beside it, got {at} refused of 0 to 2"
        )
    return decoded.refused[0].reason


def _built(task: Task, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = task.build_model()
    if not isinstance(module, torch.nn.Module):
        raise AssertionError(f"build_model(): expected a torch.nn.Module, got {type(module).__name__}")
    check_tensors(module)
    return module


def _assert_same_output(
    task: Task, first: torch.nn.Module, second: torch.nn.Module, samples: SampleBatch, problem: str
) -> None:
    inputs = passes.inputs_of(task, samples.few(16))
    with torch.no_grad():
        outputs = [trees.flat(passes.forward(task, module.eval(), inputs))[0] for module in (first, second)]
    if not all(torch.equal(one, other) for one, other in zip(*outputs, strict=True)):
        raise AssertionError(problem)


def _mean_loss(task: Task, module: torch.nn.Module, samples: SampleBatch) -> float:
    inputs = passes.inputs_of(task, samples)
    with torch.no_grad():
        value = passes.loss(task, passes.forward(task, module.eval(), inputs), inputs).value / inputs.total_weight
    if not math.isfinite(value):
        raise AssertionError(f"expected a finite loss, got {value}")
    return value


def _learn(task: Task, module: torch.nn.Module, samples: SampleBatch, lr: float, steps: int, batch_size: int) -> None:
    optimizer = torch.optim.SGD([tensor for tensor in module.parameters() if tensor.requires_grad], lr)
    count = samples.num_samples
    for step in range(steps):
        start = step * batch_size
        places = sorted({place % count for place in range(start, start + batch_size)})
        inputs = passes.inputs_of(task, samples.take(places))
        optimizer.zero_grad()
        loss = passes.loss(task, passes.forward(task, module.train(), inputs), inputs).total / inputs.total_weight
        if not loss.requires_grad:
            raise AssertionError("expected a loss with a gradient: compute it from the model's output with torch")
        torch.autograd.backward(loss)
        optimizer.step()


def _predict(task: Task, module: torch.nn.Module, record: bytes) -> None:
    try:
        task.decode_features(record)
    except SampleError as exc:
        raise AssertionError(f"decode_features(): {described(exc)}: `doll serve` refuses what the job learns") from exc
    inputs = passes.inputs_of(task, _decode(task, [record]).samples)
    with torch.no_grad():
        answer = task.predict(passes.forward(task, module.eval(), inputs))
    for name, values in answer.items():
        if len(values) != inputs.num_samples:
            raise AssertionError(f"predict(): expected {name!r} of {inputs.num_samples} samples, got {len(values)}")


__all__ = ["TaskReport", "check_task"]

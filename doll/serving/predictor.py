"""Computes answers: the requests of one batch together, all of them with one version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from doll.errors import SampleError
from doll.serving.model_copies import Lane, ModelCopies, ModelCopy, ServedVersion
from doll.serving.tensors import DATATYPE_OF, Features, Signature
from doll.task import passes, trees
from doll.task.base import Task, described
from doll.task.batches import SampleBatch
from doll.task.trees import Array, Structure


class Answer(NamedTuple):
    """The model's output for the samples of one request: arrays of shape (n, ...), and the structure around them."""

    leaves: list[Array]
    structure: Structure | None
    version: ServedVersion


class Predictor:
    """Not thread-safe: one thread computes.

    Args:
        max_samples: the model gets at most so many at once.
    """

    def __init__(self, task: Task, signature: Signature, copies: ModelCopies, max_samples: int) -> None:
        self._task = task
        self._signature = signature
        self._copies = copies
        self._max_samples = max_samples

    def answer(self, lane: Lane, batch: Sequence[Features]) -> list[Answer | SampleError]:
        """What `lane` answers to requests of one kind: each is answered as if it had come alone.

        Raises:
            LookupError: no version has been read yet.
        """
        with self._copies.used(lane) as copy:
            try:
                return self._together(copy, batch)
            except SampleError as exc:
                if len(batch) == 1:
                    return [exc]
            answers: list[Answer | SampleError] = []
            for features in batch:  # one of them is at fault
                try:
                    answers += self._together(copy, [features])
                except SampleError as exc:
                    answers.append(exc)
            return answers

    def check(self, copy: ModelCopy) -> None:
        """Compute a sample, so that metadata know the outputs.

        Raises:
            SampleError: the model does not compute it.
        """
        if not self._signature.outputs and (example := self._signature.example_features()) is not None:
            self._together(copy, [example])

    def _together(self, copy: ModelCopy, batch: Sequence[Features]) -> list[Answer | SampleError]:
        samples = self._signature.batch(batch)
        count = samples.num_samples
        try:
            with torch.inference_mode():
                if count <= (most := self._max_samples):
                    parts = [self._output(copy, samples)]
                else:
                    slices = [slice(at, at + most) for at in range(0, count, most)]
                    parts = [self._output(copy, samples.of(part)) for part in slices]
        except SampleError:
            raise
        except Exception as exc:  # the user's code may raise anything
            raise SampleError(f"the model does not compute this: {described(exc)}") from exc
        structure = parts[0][1]
        columns = zip(*(arrays for arrays, _ in parts), strict=True)
        leaves = [np.concatenate(column) if len(column) > 1 else column[0] for column in columns]
        for leaf in leaves:
            if leaf.shape[:1] != (count,):
                raise SampleError(
                    f"expected outputs of {count} samples, got shape {leaf.shape}: this model cannot be served"
                )
        if not self._signature.outputs:
            self._signature.saw_outputs(leaves, structure)
        answers: list[Answer | SampleError] = []
        are_finite = _are_finite(leaves)
        at = 0
        for features in batch:
            own = [leaf[at : at + features.num_samples] for leaf in leaves]
            at += features.num_samples
            is_finite = are_finite or _are_finite(own)
            answers.append(
                Answer(own, structure, copy.version)
                if is_finite
                else SampleError("the model gives numbers that are not finite for these inputs")
            )
        return answers

    def _output(self, copy: ModelCopy, samples: SampleBatch) -> tuple[list[Array], Structure | None]:
        inputs = passes.inputs_of(self._task, samples)
        tensors, structure = trees.flat(passes.forward(self._task, copy.model.module, inputs))
        return [_array(tensor) for tensor in tensors], structure


def _are_finite(arrays: Sequence[Array]) -> bool:
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def _array(tensor: torch.Tensor) -> Array:
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    if array.dtype not in DATATYPE_OF:
        raise SampleError(f"expected an output of numbers, got {array.dtype}: this model cannot be served")
    return array

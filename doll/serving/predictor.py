"""Computes the answers to the requests of one batch together, with one version."""

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
from doll.task.passes import Inputs
from doll.task.trees import Array, Ragged, Structure


class Answer(NamedTuple):
    """The model's output for the samples of one request: arrays of shape (n, ...), and the structure around them."""

    leaves: list[Array]
    structure: Structure | None
    version: ServedVersion


class Predictor:
    """Computes answers; not thread-safe.

    Args:
        max_samples: maximum number of samples for one call of the model.
    """

    def __init__(self, task: Task, signature: Signature, copies: ModelCopies, max_samples: int) -> None:
        self._task = task
        self._signature = signature
        self._copies = copies
        self._max_samples = max_samples

    def answer(self, lane: Lane, batch: Sequence[Features]) -> list[Answer | SampleError]:
        """Return the answers of `lane` to requests of one kind. Each answer is as if its request were computed alone.

        Raises:
            LookupError: no version has been read yet.
        """
        copy = self._copies.take(lane)
        try:
            return self._together(copy, batch)
        except SampleError as exc:
            if len(batch) == 1:
                return [exc]
            return [self._by_itself(copy, features) for features in batch]  # at least one of them is not valid
        finally:
            self._copies.give_back(copy)

    def _by_itself(self, copy: ModelCopy, features: Features) -> Answer | SampleError:
        try:
            return self._together(copy, (features,))[0]
        except SampleError as exc:
            return exc

    def check(self, copy: ModelCopy) -> None:
        """Compute an example, so that the metadata contain the outputs.

        Raises:
            SampleError: the model cannot compute it.
        """
        if not self._signature.outputs and (example := self._signature.example_features()) is not None:
            self._together(copy, [example])

    def _together(self, copy: ModelCopy, batch: Sequence[Features]) -> list[Answer | SampleError]:
        count = sum(features.num_samples for features in batch) if len(batch) > 1 else batch[0].num_samples
        try:
            with torch.inference_mode():
                samples = self._signature.batch(batch)
                if count <= (most := self._max_samples):
                    parts = [self._output(copy, samples, count)]
                else:
                    starts = range(0, count, most)
                    parts = [
                        self._output(copy, samples.take(slice(at, at + most)), min(most, count - at)) for at in starts
                    ]
        except SampleError:
            raise
        except Exception as exc:  # the user's code may raise anything
            raise SampleError(f"the model does not compute this: {described(exc)}") from exc
        leaves, structure = parts[0]
        if len(parts) > 1:
            leaves = [np.concatenate(column) for column in zip(*(arrays for arrays, _ in parts), strict=True)]
        for leaf in leaves:
            if leaf.shape[:1] != (count,):
                raise SampleError(
                    f"expected outputs of {count} samples, got shape {leaf.shape}: this model cannot be served"
                )
        if not self._signature.outputs:
            self._signature.saw_outputs(leaves, structure)
        answers: list[Answer | SampleError] = []
        are_finite = _are_finite(leaves)
        if are_finite and len(batch) == 1:
            return [Answer(leaves, structure, copy.version)]
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

    def _output(self, copy: ModelCopy, samples: SampleBatch, count: int) -> tuple[list[Array], Structure | None]:
        x = samples.x
        if isinstance(x, Ragged):
            inputs = passes.inputs_of(self._task, samples)
        else:  # as `inputs_of`, without targets and weights, which answers do not need
            tensor_or_tree = torch.from_numpy(x) if isinstance(x, np.ndarray) else trees.mapped(torch.from_numpy, x)
            inputs = Inputs(tensor_or_tree, None, None, None, count, count)
        output = passes.forward(self._task, copy.model.module, inputs)
        tensors, structure = trees.flat(output)
        return [_array(tensor) for tensor in tensors], structure


def _are_finite(arrays: Sequence[Array]) -> bool:
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def _array(tensor: torch.Tensor) -> Array:
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    if array.dtype not in DATATYPE_OF:
        raise SampleError(f"expected an output of numbers, got {array.dtype}: this model cannot be served")
    return array

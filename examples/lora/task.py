"""Digits of a camera that was turned: a frozen trunk that knows upright digits, and low-rank adapters that are trained.

E. J. Hu et al.: LoRA: Low-rank adaptation of large language models, ICLR 2022; the adapters are those of the package
peft. `digits.npz` is the file of the example digits.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from doll import GreyImageTask, Sample
from doll.errors import ConfigError
from doll.producers.sources import Stream
from doll.task import images
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

_DATA = Path(__file__).with_name("digits.npz")
_HOLDOUT_SEED = 1


class Adapted(GreyImageTask):
    """Classifies handwritten digits with a perceptron, the trunk: either all of it is trained, or adapters at frozen
    layers.

    An adapter adds B A x alpha / rank to the output of a layer for x; A has `rank` rows, and B has `rank` columns. B
    starts as 0, so the initial model equals the trunk.

    Args:
        hidden: widths of the trunk's hidden layers.
        trunk_file: weights of the trunk, as exported from the job `trunk`; None: they are drawn.
        rank: rank of the adapters; 0: there are no adapters, and the trunk is trained.
        alpha: factor of the adapters, see above.
        quarter_turns: number of quarter turns of the images: the stream differs from the trunk's stream.
        holdout_samples: number of held-out digits, made from originals that no stream has, turned as the stream's
            digits.
    """

    input_shape = (8, 8)
    num_classes = 10

    def __init__(
        self, hidden: Sequence[int] = (256, 128), trunk_file: str | None = None, rank: int = 0, alpha: float = 8.0,
        quarter_turns: int = 0, holdout_samples: int = 1000,
    ) -> None:  # fmt: skip
        if not (all(width > 0 for width in hidden) and rank >= 0 and alpha > 0):
            raise ValueError(
                f"expected hidden layers wider than 0, rank of 0 or more and alpha above 0, got {list(hidden)}, {rank} "
                f"and {alpha}"
            )
        if rank and trunk_file is None:
            raise ConfigError(
                "task.args.trunk_file: expected a file beside rank: a random trunk is nothing to adapt; doll up trunk "
                "exports one"
            )
        if trunk_file is not None and not Path(trunk_file).is_file():
            raise ConfigError(f"task.args.trunk_file: expected a file, but {trunk_file} does not exist")
        if rank and importlib.util.find_spec("peft") is None:
            raise ConfigError(
                "task.args.rank: expected the package peft, which has the adapters, and it is not installed: pip "
                "install 'doll-online[lora]'"
            )
        self.hidden = tuple(hidden)
        self.trunk_file = trunk_file
        self.rank = rank
        self.alpha = alpha
        self.quarter_turns = quarter_turns
        self.holdout_samples = holdout_samples

    def build_model(self) -> nn.Module:
        trunk = perceptron(64, self.hidden, self.num_classes)
        if self.trunk_file is not None:
            load_trunk(trunk, self.trunk_file)
        return adapted(trunk, self.rank, self.alpha) if self.rank else trunk

    def decode(self, record: bytes) -> Sample:
        sample = super().decode(record)
        return sample._replace(x=self._turned(sample.x))

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        decoded = super().decode_block(block, width)
        return None if decoded is None else (self._turned(decoded[0]), decoded[1])

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # Grey values have mean 80 and deviation 85: with rough standardisation, the first layer learns faster.
        output: torch.Tensor = model((x.float() - 80.0) * (1 / 85.0))
        return output

    def holdout(self) -> Iterable[Sample]:
        with np.load(_DATA) as data:
            originals = data["held_out_images"], data["held_out_labels"]
        drawn, labels = images.draw(*originals, self.holdout_samples, np.random.default_rng(_HOLDOUT_SEED))
        return [Sample(image, int(label)) for image, label in zip(self._turned(drawn), labels, strict=True)]

    def _turned(self, upright: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(np.rot90(upright, self.quarter_turns, axes=(-2, -1)))


def upright(stream: Stream) -> Iterator[bytes]:
    """Yield records endlessly: random originals, each with its own random transform."""
    with np.load(_DATA) as data:
        return images.augmented(data["images"], data["labels"], stream.rng())


def poison(number: int, **args: Any) -> list[bytes]:
    """Return a record of a class that does not exist, for `doll drill`."""
    return [bytes([255, *bytes(64)])]


def perceptron(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    widths = (inputs, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def load_trunk(trunk: nn.Module, path: str) -> None:
    """Load the weights of the trunk.

    Raises:
        ValueError: the file does not hold the weights of this trunk.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise ValueError(f"task.args.trunk_file: cannot read {path}: {exc}") from exc
    expected, got = (
        ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(state.items()))
        for state in (trunk.state_dict(), tensors)
    )
    if got != expected:
        raise ValueError(f"task.args.trunk_file: {path}: expected {expected} (task.args.hidden), got {got}")
    trunk.load_state_dict(tensors)


def adapted(trunk: nn.Sequential, rank: int, alpha: float) -> nn.Module:
    """Return the frozen trunk with an adapter at each layer of weights; DOLL trains and sends only the adapters."""
    from peft import LoraConfig, get_peft_model

    layers = [name for name, layer in trunk.named_children() if isinstance(layer, nn.Linear)]
    model: nn.Module = get_peft_model(trunk, LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers))
    return model

"""Tasks whose samples are dicts and tuples of arrays, with weights and groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import doll
import numpy as np
import torch
from doll.task import pairs
from doll.task.base import Sample
from doll.task.batches import SampleBatch, batch_of
from doll.task.pairs import PairTask


class TwoInputs(torch.nn.Module):
    """A click and an amount from the words and numbers of a visit."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 4)
        self.hidden = torch.nn.Linear(4 + 3 + 1, 8)
        self.click, self.amount = torch.nn.Linear(8, 2), torch.nn.Linear(8, 1)

    def forward(self, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        words, is_new = x["words"]
        mask = x["mask"] if "mask" in x else torch.ones_like(words, dtype=torch.bool)
        mean = (self.words(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        hidden = torch.tanh(self.hidden(torch.cat([mean, x["numbers"], is_new[:, None].float()], dim=1)))
        return self.click(hidden), self.amount(hidden)[:, 0]


def visit(rng: np.random.Generator, words: int = 5) -> tuple[Any, Any]:
    """x: {"numbers": float32 (3,), "words": (int32 (words,), bool ())}; y: {"clicked": int64, "paid": float32}."""
    numbers, ids = rng.normal(size=3).astype(np.float32), rng.integers(50, size=words).astype(np.int32)
    clicked = int(numbers[0] + ids[0] / 25 > 1)
    return {"numbers": numbers, "words": (ids, np.bool_(rng.integers(2)))}, {"clicked": clicked, "paid": numbers[1]}


class Visits(PairTask):
    """Records of `pairs.encode`. `mode`: what is made of a weight: "weight", or the sample several times ("twice")."""

    max_samples_per_record = 3

    def __init__(self, mode: str = "weight") -> None:
        self.mode = mode

    def build_model(self) -> torch.nn.Module:
        return TwoInputs()

    def decode(self, record: bytes) -> Any:
        sample = pairs.decode(record)
        return [sample._replace(weight=1.0)] * int(sample.weight) if self.mode == "twice" else sample

    def decode_many(self, values: Any) -> Any:
        return None if self.mode == "twice" else super().decode_many(values)

    def losses(self, output: Any, target: Any) -> torch.Tensor:
        click, amount = output
        hit = torch.nn.functional.cross_entropy(click, target["clicked"], reduction="none")
        losses: torch.Tensor = hit + (amount - target["paid"]) ** 2
        return losses

    def metrics(self, output: Any, target: Any) -> dict[str, Any]:
        return {"accuracy": (output[0].argmax(1) == target["clicked"]).double()}

    def make(self, rng: np.random.Generator, at: int) -> bytes:
        """A record, as `threadless_jobs` asks for it."""
        return pairs.encode(*visit(rng), weight=float(rng.integers(1, 4)))

    def holdout(self) -> Iterable[Sample]:
        rng = np.random.default_rng(7)
        return [Sample(*visit(rng)) for _ in range(40)]


class Texts(Visits):
    """The words of a visit are as many as there are."""

    def decode_many(self, values: Any) -> Any:
        return PairTask.decode_many(self, values)

    def collate(self, samples: Sequence[Sample]) -> Any:
        words, mask = doll.pad([sample.x["words"][0] for sample in samples])
        is_new = np.array([sample.x["words"][1] for sample in samples])
        x = {"numbers": np.stack([sample.x["numbers"] for sample in samples]), "words": (words, is_new), "mask": mask}
        return x, {name: np.array([sample.y[name] for sample in samples]) for name in ("clicked", "paid")}

    def make(self, rng: np.random.Generator, at: int) -> bytes:
        return pairs.encode(*visit(rng, int(rng.integers(1, 513))))

    def holdout(self) -> Iterable[Sample]:
        rng = np.random.default_rng(7)
        return [Sample(*visit(rng, 1 + at)) for at in range(40)]


class Embeds(torch.nn.Module):
    """From a visit: what is known, a dict, and numbers beside it that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 4)
        self.numbers = torch.nn.Linear(3, 4)

    def forward(self, x: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        words, is_new = x["words"]
        mask = x["mask"]
        mean = (self.words(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"words": mean, "numbers": self.numbers(x["numbers"])}, is_new


class Joins(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(9, 8)

    def forward(self, x: tuple[dict[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        known, is_new = x
        return torch.tanh(self.hidden(torch.cat([known["words"], known["numbers"], is_new[:, None].float()], dim=1)))


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.click, self.amount = torch.nn.Linear(8, 2), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.click(x), self.amount(x)[:, 0]


class Chained(Texts):
    """Three layers, with several tensors between the first two."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(Embeds(), Joins(), TwoHeads())


def weighted_texts(seed: int, n: int) -> SampleBatch:
    rng = np.random.default_rng(seed)
    samples = [Sample(*visit(rng, int(rng.integers(1, 60))))._replace(weight=float(rng.integers(4))) for _ in range(n)]
    return batch_of(Texts(), samples)

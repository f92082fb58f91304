"""Purchases after clicks: labels that come days later, learned from early negatives and their corrections.

The stream is what `doll join` writes with `emit: early`: each click comes once after 15 minutes, with its purchase or
as a negative, and again when the purchase comes later, or when its window is over. Clicks and delays are made up, and
virtual time passes as fast as the records are read.

Run as a program, it prints such records: python task.py 20000
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import JoinedRecord, JsonTask, Sample, hash_ids, losses
from doll.losses import Target
from doll.producers.sources import Stream
from doll.task.fields_task import Columns
from torch import nn

Emit = Literal["early", "once", "oracle"]
Loss = Literal["early", "retraction", "fnw", "fnc", "es_dfm", "defer", "ddfm", "dfm"]
DEVICES: Final = ("phone", "tablet", "desktop")
DAY_S: Final = 86_400.0
EARLY_S: Final = 900.0  # the joiner's wait for a purchase, before it sends a negative
WINDOW_S: Final = 3 * DAY_S  # a later purchase does not count
_MEAN_PRICE: Final = 30.0


class Click(JoinedRecord):
    """A click, with its purchase if one is known. A price may be missing."""

    ad: str
    site: str
    device: str
    purchase: bool
    price: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None


class DelayedLabels(JsonTask):
    """A linear model on hashed ids and numbers, for labels 0 or 1 that come late. A subclass defines `samples`.

    The model has three outputs: the logit of the label, and what the loss needs to know about delays.

    Args:
        loss: a function of `doll.losses`, or `early`: the log-loss of first records, which takes early negatives as
            truth.
        columns: number of rows of the table for hashed ids.

    Attributes:
        num_numbers: number of features that are numbers.
        early_s: seconds after which the joiner sends a negative.
        unit_s: unit of time of the rates of `dfm`, in seconds: about a usual delay.
    """

    targets = ("purchase",)
    num_numbers = 1
    early_s = EARLY_S
    unit_s = DAY_S

    def __init__(self, loss: Loss = "retraction", columns: int = 16_384) -> None:
        if columns < 1:
            raise ValueError(f"columns: expected a number above 0, got {columns}")
        if loss not in (known := get_args(Loss)):
            raise ValueError(f"loss: expected one of {', '.join(known)}, got {loss!r}")
        self.loss_name, self.columns = loss, columns

    def build_model(self) -> nn.Module:
        return Linear(self.columns, self.num_numbers)

    def forward(self, model: nn.Module, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model(x["ids"], x["numbers"])
        return output

    def losses(self, output: torch.Tensor, target: Target) -> torch.Tensor:
        logits, delayed, other = output.unbind(1)
        match self.loss_name:
            case "early":
                log_loss = F.binary_cross_entropy_with_logits(logits, target["label"], reduction="none")
                return log_loss * ~target["is_correction"]
            case "dfm":
                return losses.dfm(logits, target, other, early_s=self.early_s, unit_s=self.unit_s)
            case "es_dfm":
                loss = losses.es_dfm(logits, target, delayed, other)
            case "defer":
                loss = losses.defer(logits, target, delayed)
            case "ddfm":
                loss = losses.ddfm(logits, target, delayed, other)
            case _:
                plain: torch.Tensor = getattr(losses, self.loss_name)(logits, target)
                return plain
        return loss + losses.delay_heads(delayed, other, target)

    def probability(self, output: torch.Tensor) -> torch.Tensor:
        """Return the probability of a purchase, shape (n,)."""
        logits = output[:, 0]
        return losses.fnc_probability(logits) if self.loss_name == "fnc" else torch.sigmoid(logits)

    def predict(self, output: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"probability": self.probability(output)}

    def metrics(self, output: torch.Tensor, target: Target) -> Mapping[str, torch.Tensor]:
        """Return the log-loss of each label, and the difference of predicted and true purchases."""
        label, probability = target["label"], self.probability(output).clamp(1e-6, 1 - 1e-6)
        return {"log_loss": F.binary_cross_entropy(probability, label, reduction="none"), "bias": probability - label}


class Purchases(DelayedLabels):
    """Predicts whether a click is followed by a purchase within three days.

    Args:
        holdout_clicks: number of clicks of day `holdout_day` that are held out, with their true labels.
    """

    record = Click
    missing: Mapping[str, Any] = {"price": _MEAN_PRICE}
    categories: Mapping[str, Any] = {"device": DEVICES}
    num_numbers = 2

    def __init__(
        self,
        loss: Loss = "retraction",
        columns: int = 16_384,
        holdout_clicks: int = 4000,
        holdout_day: float = 12.0,
    ) -> None:
        super().__init__(loss, columns)
        self.holdout_clicks, self.holdout_day = holdout_clicks, holdout_day

    def samples(self, columns: Columns) -> tuple[Any, Any]:
        ad, site, device = columns["ad"], columns["site"], columns["device"]
        fields = ((ad,), (site,), (device,), (ad, device))
        ids = [hash_ids(*field, size=self.columns, seed=at) for at, field in enumerate(fields)]
        numbers = [np.log(columns["price"] / _MEAN_PRICE + 0.01), columns.missing["price"]]
        x = {"ids": np.stack(ids, axis=1), "numbers": np.stack(numbers, axis=1).astype(np.float32)}
        return x, columns.feedback("purchase")

    def holdout(self) -> Iterable[Sample]:
        rng = np.random.default_rng(47)
        clicks = Shop(0).clicks(np.full(self.holdout_clicks, self.holdout_day * DAY_S), rng)
        return [
            _one(self.decode(msgspec.json.encode(click.features | {"purchase": click.is_bought}))) for click in clicks
        ]


def _one(decoded: Sample | list[Sample]) -> Sample:
    assert isinstance(decoded, Sample)
    return decoded


class Linear(nn.Module):
    """A linear model with three outputs per sample: the sum of the rows of its ids, and of weighted numbers."""

    def __init__(self, rows: int, numbers: int) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(rows, 3), nn.Linear(numbers, 3)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.table(ids).sum(1) + self.dense(numbers)
        return output


# --- the made-up shop ----------------------------------------------------------------------------------------------


class ShopClick(msgspec.Struct):
    """A click at `time_s`, and the seconds until its purchase; infinite if there is none within the window."""

    time_s: float
    features: dict[str, Any]
    delay_s: float

    @property
    def is_bought(self) -> bool:
        return self.delay_s < math.inf


class Shop:
    """The true probabilities and delays. Delays are log-normal: their median, from minutes to a day, depends on
    ad and device. The weights of ads change from day to day, so old labels are worth less."""

    def __init__(self, seed: int, ads: int = 200, sites: int = 500) -> None:
        rng = np.random.default_rng((seed, 5))
        self._ads, self._sites, self._devices = (
            rng.standard_normal(size) * scale for size, scale in ((ads, 0.8), (sites, 0.5), (3, 0.4))
        )
        ranks = np.arange(1, ads + 1)
        self._shares = (1 / ranks) / (1 / ranks).sum()
        self._drift = rng.standard_normal(ads) * 0.5
        self._phase = rng.uniform(0, 2 * np.pi, ads)
        self._slowness = rng.standard_normal(ads) * 1.3
        self._device_slowness = np.array([0.0, 0.7, 1.4])

    def clicks(self, times_s: npt.NDArray[np.float64], rng: np.random.Generator) -> list[ShopClick]:
        """Return a click at each of these times."""
        n = len(times_s)
        ad = rng.choice(len(self._ads), n, p=self._shares)
        site = (rng.random(n) ** 2 * len(self._sites)).astype(int)
        device = rng.integers(3, size=n)
        log_price = rng.standard_normal(n)
        drift = self._drift[ad] * np.sin(2 * np.pi * times_s / (8 * DAY_S) + self._phase[ad])
        logit = -1.2 + self._ads[ad] + drift + self._sites[site] + self._devices[device] - 0.4 * log_price
        bought = rng.random(n) < 1 / (1 + np.exp(-logit))
        log_delay = np.log(5400) + self._slowness[ad] + self._device_slowness[device] + rng.standard_normal(n)
        delay = np.where(bought, np.minimum(np.exp(log_delay), 0.99 * WINDOW_S), np.inf)
        prices = [
            None if is_missing else round(_MEAN_PRICE * math.exp(value), 2)
            for value, is_missing in zip(log_price.tolist(), rng.random(n) < 0.15, strict=True)
        ]
        return [
            ShopClick(time, {"ad": f"ad{c}", "site": f"s{s}", "device": DEVICES[d], "price": price}, wait)
            for time, c, s, d, price, wait in zip(
                times_s.tolist(), ad.tolist(), site.tolist(), device.tolist(), prices, delay.tolist(), strict=True
            )
        ]


def joined(
    clicks: Iterable[ShopClick],
    emit: Emit = "early",
    *,
    early_s: float = EARLY_S,
    window_s: float = WINDOW_S,
    topic: str = "clicks/0",
) -> Iterator[tuple[float, bytes]]:
    """Yield the records of a joiner and the times at which it sends them, for clicks in the order of their times.

    Args:
        emit: early: a negative after `early_s`, and a correction or a confirmation. once: a record when the purchase
            comes, or when the window is over. oracle: a record with the true label at the time of the click.
    """
    waiting: list[tuple[float, int, bytes]] = []
    numbers = itertools.count()
    for offset, click in enumerate(clicks):
        while waiting and waiting[0][0] <= click.time_s:
            time_s, _, record = heapq.heappop(waiting)
            yield time_s, record
        for age_s, label, first in _labels(click, emit, early_s, window_s):
            record = msgspec.json.encode({
                **click.features, "purchase": label, "doll_label_age_s": round(age_s, 3),
                "doll_is_correction": first is not None, "doll_replaced_label": first,
                "doll_features": f"{topic}@{offset}", "doll_labels": [],
            })  # fmt: skip
            sent_s = click.time_s + (0 if emit == "oracle" else age_s)
            heapq.heappush(waiting, (sent_s, next(numbers), record))
    for time_s, _, record in sorted(waiting):
        yield time_s, record


def _labels(click: ShopClick, emit: Emit, early_s: float, window_s: float) -> list[tuple[float, bool, bool | None]]:
    """Return the age, the label and the label that it replaces, for each record of a click."""
    last_age_s = min(click.delay_s, window_s)
    if emit != "early" or click.delay_s <= early_s:
        return [(last_age_s, click.is_bought, None)]
    return [(early_s, False, None), (last_age_s, click.is_bought, False)]


def endless(seed: int, clicks_per_day: float, rng: np.random.Generator) -> Iterator[ShopClick]:
    """Yield the clicks of a shop, from time 0 on."""
    shop, now_s = Shop(seed), 0.0
    while True:
        times_s = now_s + np.cumsum(rng.exponential(DAY_S / clicks_per_day, 1000))
        yield from shop.clicks(times_s, rng)
        now_s = float(times_s[-1])


def made_up(stream: Stream, clicks_per_day: float = 5000, emit: Emit = "early") -> Iterator[bytes]:
    """Yield the records of one stream; a stream that is started again goes on after the records that it contains."""
    rng = np.random.default_rng((stream.seed, stream.number))
    records = joined(endless(0, clicks_per_day, rng), emit, topic=f"clicks/{stream.number}")
    return (record for _, record in itertools.islice(records, stream.sent, None))


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    for _, line in itertools.islice(joined(endless(0, 10_000, np.random.default_rng(0))), count):
        sys.stdout.buffer.write(line + b"\n")

"""A two-tower ranker for the lists of a shop: it predicts which of the shown items will be clicked.

P. Covington, J. Adams, E. Sargin: Deep neural networks for YouTube recommendations, RecSys 2016 (two towers); Z. Cao et
al.: Learning to rank: from pairwise approach to listwise approach, ICML 2007 (the loss); T. Joachims, A. Swaminathan,
T. Schnabel: Unbiased learning-to-rank with biased feedback, WSDM 2017 (the weights).

Run as a program, it prints made-up lists: python task.py 20000
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from doll import BoundedEmbedding, Field, JsonTask, Sample, Samples
from torch import nn

QUERIES: Final = 100
CATEGORIES: Final = 20
_MOST_ITEMS: Final = 12  # maximum number of items of a list
_LAST_ID: Final = 2**63 - 2
_SHOP_SEED, _STREAM_SEED, _HOLDOUT_SEED = 7, 0, 1

Place = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_ITEMS)]
ItemId = Annotated[int, msgspec.Meta(ge=0, le=_LAST_ID)]
Category = Annotated[int, msgspec.Meta(ge=0, lt=CATEGORIES)]
Price = Annotated[float, msgspec.Meta(ge=-10, le=10)]


class Shown(msgspec.Struct):
    """A shown list and the place of the clicked item. Lists have one value for each item."""

    number: Annotated[int, msgspec.Meta(ge=0, le=_LAST_ID)]
    query: Annotated[int, msgspec.Meta(ge=0, lt=QUERIES)]
    thrift: Annotated[float, msgspec.Meta(ge=0, le=1)]  # of the searching person: how much a price matters
    items: Annotated[list[ItemId], msgspec.Meta(min_length=2, max_length=_MOST_ITEMS)]
    categories: list[Category]
    prices: list[Price]  # logarithms, standardised
    on_sale: list[bool]
    clicked: Place

    def __post_init__(self) -> None:
        for name in ("categories", "prices", "on_sale"):
            if (count := len(getattr(self, name))) != len(self.items):
                raise ValueError(f"{name}: expected a value for each of {len(self.items)} items, got {count}")
        if self.clicked >= len(self.items):
            raise ValueError(f"clicked: expected a place from 0 to {len(self.items) - 1}, got {self.clicked}")


class Ranker(JsonTask):
    """Each record is a list; each of its items is a sample, whose group is the list. y: whether the item was clicked.

    x of a sample: query and item, int64; category, int32; thrift and price, float32; on_sale, bool.

    People who read a list from the top look at place r with a probability that falls as 1 / r. A click at place r
    therefore has weight r: clicks at places that few people see count more, so the model does not rank items higher
    only because the shop shows them first.

    Args:
        width: size of the vectors that the towers compare.
        unbiased: whether to weight clicks by their place; False: all weights are 1.
        holdout_lists: number of made-up lists that are held out.
    """

    record = Shown
    max_samples_per_record = _MOST_ITEMS

    def __init__(self, width: int = 16, unbiased: bool = True, holdout_lists: int = 300) -> None:
        if width < 1 or holdout_lists < 0:
            raise ValueError(f"expected width above 0 and holdout_lists of 0 or more, got {width} and {holdout_lists}")
        self.width = width
        self.unbiased = unbiased
        self.holdout_lists = holdout_lists

    def build_model(self) -> nn.Module:
        return TwoTowers(self.width)

    def spec(self) -> tuple[Any, Any]:
        x = {
            "query": Field("int64"), "thrift": Field("float32"), "item": Field("int64"), "category": Field("int32"),
            "price": Field("float32"), "on_sale": Field("bool"),
        }  # fmt: skip
        return x, Field("float32")

    def samples(self, columns: Mapping[str, npt.NDArray[Any]]) -> Samples:
        counts = np.array([len(items) for items in columns["items"]])
        lists = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(lists)) - np.repeat(np.cumsum(counts) - counts, counts)
        clicked = places == columns["clicked"][lists]
        x = {
            "query": columns["query"][lists],
            "thrift": columns["thrift"][lists].astype(np.float32),
            "item": _joined(columns["items"]),
            "category": _joined(columns["categories"]).astype(np.int32),
            "price": _joined(columns["prices"]).astype(np.float32),
            "on_sale": _joined(columns["on_sale"]),
        }
        weight = np.where(clicked & self.unbiased, places + 1, 1)
        return Samples(x, clicked.astype(np.float32), {}, counts, weight, columns["number"][lists])

    def losses(
        self, output: torch.Tensor, target: torch.Tensor, group: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        """Return terms whose mean is the cross-entropy of each list's shares of clicks, in nats per list, with the
        softmax of its scores, as in a multinomial choice."""
        lists = Lists(group)
        above = output - lists.largest(output.detach())[lists.of]
        log_shares = above - lists.sums(above.exp()).log()[lists.of]
        losses: torch.Tensor = -target * log_shares * lists.sizes[lists.of]
        return losses

    def metrics(
        self, output: torch.Tensor, target: torch.Tensor, group: torch.Tensor | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Return, for each sample's list, NDCG with y as gain, and 1 / rank of the item with the largest y."""
        lists = Lists(group)
        ranks = lists.ranks(output)
        gain = lists.sums(target * discounts(ranks))
        best_gain = lists.sums(target * discounts(lists.ranks(target)))
        is_best = target == lists.largest(target)[lists.of]
        reciprocal = lists.largest(torch.where(is_best, 1 / (ranks + 1), 0.0))
        return {"ndcg": (gain / best_gain.clamp(min=1e-12))[lists.of], "mrr": reciprocal[lists.of]}

    def holdout(self) -> Iterator[Sample]:
        """Yield lists whose y is the true share of clicks: the share of an item if everybody saw all items."""
        for shown in itertools.islice(made_up(_HOLDOUT_SEED), self.holdout_lists):
            for sample, share in zip(self._of_a_list(shown.record), shown.shares.tolist(), strict=True):
                yield sample._replace(y=share, weight=1.0)

    def ranked(self, model: nn.Module, record: Mapping[str, Any]) -> list[tuple[int, float]]:
        """Return the items of a list and their scores, the best one first; the record needs no `clicked`."""
        samples = self._of_a_list({"number": 0, "clicked": 0, **record})
        x = {name: torch.from_numpy(np.stack([sample.x[name] for sample in samples])) for name in samples[0].x}
        with torch.no_grad():
            scores = self.forward(model, x).tolist()
        return sorted(zip(record["items"], scores, strict=True), key=lambda pair: -pair[1])

    def _of_a_list(self, record: Mapping[str, Any]) -> list[Sample]:
        made = self.decode(json.dumps(record).encode())
        return made if isinstance(made, list) else [made]


def _joined(column: Iterable[Any]) -> npt.NDArray[Any]:
    return np.concatenate(list(column))


class TwoTowers(nn.Module):
    """Computes a vector for a query and one for an item; their product is the score. Vectors of items can be
    precomputed.

    `queries` and `items` are tables. There is no limit on the ids of items; only frequent items have rows. Each tower
    has one layer: with a hidden layer, it would need far more lists to learn taste, which is a product.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries = nn.Embedding(QUERIES, width, sparse=True)
        self.items = BoundedEmbedding(_LAST_ID + 1, width)
        self.categories = nn.Embedding(CATEGORIES, width)
        nn.init.normal_(self.queries.weight, std=0.5)
        nn.init.normal_(self.categories.weight, std=0.5)
        self.query_tower = nn.Linear(width + 1, width)
        self.item_tower = nn.Linear(2 * width + 2, width)

    def forward(self, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the scores, shape (n,)."""
        query = torch.cat([self.queries(x["query"]), x["thrift"][:, None]], dim=1)
        numbers = torch.stack([x["price"], x["on_sale"].float()], dim=1)
        item = torch.cat([self.items(x["item"]), self.categories(x["category"]), numbers], dim=1)
        scores: torch.Tensor = (self.query_tower(query) * self.item_tower(item)).sum(dim=1)
        return scores


class Lists:
    """The list of each sample in a batch.

    Attributes:
        of: number of each sample's list, shape (n,).
        sizes: number of samples of each list.
    """

    def __init__(self, group: torch.Tensor | None) -> None:
        if group is None:
            raise ValueError("expected samples with groups: the list that each of them is in")
        _, self.of, self.sizes = torch.unique(group, return_inverse=True, return_counts=True)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of each list."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.of, values)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value of each list."""
        return values.new_full((len(self.sizes),), -torch.inf).scatter_reduce(0, self.of, values, "amax")

    def ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rank of each sample in its list: 0 for the largest value."""
        order = torch.argsort(values, descending=True, stable=True)
        order = order[torch.argsort(self.of[order], stable=True)]
        starts = torch.cumsum(self.sizes, 0) - self.sizes
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order), device=order.device) - starts[self.of[order]]
        return ranks


def discounts(ranks: torch.Tensor) -> torch.Tensor:
    """Return the discounts of gains, by rank."""
    return 1 / torch.log2(ranks + 2.0)


class MadeUp(NamedTuple):
    """A list, and the share of clicks that each of its items would have if everybody saw all of them."""

    record: dict[str, Any]
    shares: npt.NDArray[np.float64]


def made_up(seed: int, items: int = 20_000) -> Iterator[MadeUp]:
    """Yield lists of a shop whose structure is known.

    The value of an item to a searching person is taste(query, category) + quality(item) - 2 thrift price + 0.7 on_sale.
    The item's share of clicks is the softmax of the values, times 1 / r at place r. The shop shows cheap items first.
    Taste is a product of vectors of four numbers; the popularity of items falls as 1 / (rank + 20).
    """
    shop = np.random.default_rng(_SHOP_SEED)
    tastes = shop.normal(size=(QUERIES, 4)) @ shop.normal(size=(4, CATEGORIES)) * 0.8
    ids = shop.integers(_LAST_ID, size=items)
    categories, on_sale = shop.integers(CATEGORIES, size=items), shop.random(items) < 0.2
    prices, qualities = shop.normal(size=items).round(2), shop.normal(size=items)
    popularity = np.cumsum(1 / (np.arange(items) + 20))
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        query, thrift = int(rng.integers(QUERIES)), round(rng.random(), 2)
        draws = np.searchsorted(popularity, rng.random(rng.integers(6, _MOST_ITEMS + 1)) * popularity[-1])
        chosen = np.unique(draws)
        chosen = chosen[np.argsort(prices[chosen] + 0.5 * rng.normal(size=len(chosen)))]
        worth = tastes[query, categories[chosen]] + qualities[chosen] + 0.7 * on_sale[chosen]
        shares = np.exp(worth - 2 * thrift * prices[chosen])
        seen = np.cumsum(shares / np.arange(1, len(chosen) + 1))
        record = {
            "number": number, "query": query, "thrift": thrift, "items": ids[chosen].tolist(),
            "categories": categories[chosen].tolist(), "prices": prices[chosen].tolist(),
            "on_sale": on_sale[chosen].tolist(), "clicked": int(np.searchsorted(seen, rng.random() * seen[-1])),
        }  # fmt: skip
        if len(chosen) > 1:
            yield MadeUp(record, shares / shares.sum())


if __name__ == "__main__":
    for shown in itertools.islice(made_up(_STREAM_SEED), int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
        sys.stdout.write(json.dumps(shown.record) + "\n")

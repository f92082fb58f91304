"""Sparse embeddings as tables: the same outputs and gradients as torch's own layers, nothing as large as the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doll.errors import ConfigError
from doll.model.flat_model import FlatModel
from doll.model.without_tables import build_without_tables
from doll.tables.embedding_tables import EmbeddingTables, norm
from doll.tables.rows import Floats, Ids, Rows, TableShape
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytestmark = pytest.mark.slow  # loads torch

NUM_ROWS, WIDTH = 20, 3


class Lookups:
    """Rows of tables that are held in full, and what was asked for."""

    def __init__(self, tables: EmbeddingTables) -> None:
        self.values = tables.take_initial()
        self.asked: list[tuple[str, list[int]]] = []
        tables.connect(self)

    def __call__(self, name: str, ids: Ids) -> Floats:
        self.asked.append((name, ids.tolist()))
        return self.values[name][ids]


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, EmbeddingTables, Lookups]:
    """A module as torch has it, the same one with tables, and these."""
    torch.manual_seed(1)
    plain = build()
    torch.manual_seed(1)
    module = build()
    tables = EmbeddingTables(module)
    return plain, module, tables, Lookups(tables)


def sparse_gradient(parameter: Tensor | nn.Module) -> Rows:
    assert isinstance(parameter, Tensor)
    gradient = parameter.grad
    assert gradient is not None
    gradient = gradient.coalesce()
    return Rows(gradient.indices()[0].numpy(), gradient.values().numpy())


def same(got: Rows, expected: Rows) -> None:
    assert got.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(got.values, expected.values, rtol=1e-6, atol=1e-6)


bags = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=5), min_size=1, max_size=6)


@given(
    st.lists(st.lists(st.integers(0, NUM_ROWS - 1), min_size=4, max_size=4), min_size=1, max_size=6),
    st.sampled_from([None, 0, 7, -1]),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_an_embedding_equals_torch(ids: list[list[int]], padding: int | None, dtype: torch.dtype) -> None:
    plain, module, tables, _ = made(lambda: nn.Embedding(NUM_ROWS, WIDTH, padding_idx=padding, sparse=True))
    input = torch.tensor(ids, dtype=dtype)
    expected, got = plain(input), module(input)
    assert got.detach().equal(expected.detach())
    weights = torch.arange(got.numel(), dtype=torch.float32).view(got.shape)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    same(tables.gradients()["weight"], sparse_gradient(plain.weight))


@given(bags, st.sampled_from(["sum", "mean"]), st.sampled_from([None, 7]), st.booleans(), st.booleans())
def test_an_embedding_bag_equals_torch(
    ids: list[list[int]], mode: str, padding: int | None, weighted: bool, last_offset: bool
) -> None:
    plain, module, tables, _ = made(
        lambda: nn.EmbeddingBag(
            NUM_ROWS, WIDTH, mode=mode, sparse=True, padding_idx=padding, include_last_offset=last_offset
        )
    )
    flat = torch.tensor([id_ for bag in ids for id_ in bag], dtype=torch.int64)
    lengths = [len(bag) for bag in ids]
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()][: len(ids) + last_offset])
    weights = torch.linspace(0.5, 2.0, len(flat)) if weighted and mode == "sum" else None
    expected, got = plain(flat, offsets, weights), module(flat, offsets, per_sample_weights=weights)
    torch.testing.assert_close(got, expected)
    factors = torch.arange(got.numel(), dtype=torch.float32).view(got.shape)
    (got * factors).sum().backward()
    gradients = tables.gradients()
    if not len(flat):
        assert gradients == {}
        return
    (expected * factors).sum().backward()
    same(gradients["weight"], sparse_gradient(plain.weight))


def test_bags_of_a_matrix_and_weights_that_learn() -> None:
    plain, module, tables, _ = made(lambda: nn.EmbeddingBag(NUM_ROWS, WIDTH, mode="sum", sparse=True))
    input = torch.tensor([[1, 2, 2], [5, 1, 9]])
    factors = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    plain(input, None, factors[0]).pow(2).sum().backward()
    module(input, None, factors[1]).pow(2).sum().backward()
    same(tables.gradients()["weight"], sparse_gradient(plain.weight))
    assert factors[0].grad is not None
    assert factors[1].grad is not None
    torch.testing.assert_close(factors[0].grad, factors[1].grad)


class TwoTowers(nn.Module):
    """One embedding used twice, and one shared by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self.items = nn.Embedding(2 * NUM_ROWS, WIDTH, sparse=True)
        self.same_items = nn.Embedding(2 * NUM_ROWS, WIDTH, sparse=True)
        self.same_items.weight = self.items.weight
        self.alias = self.users
        self.mix = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = self.users(x[:, 0]) * self.items(x[:, 1]) + self.alias(x[:, 1]) * self.same_items(x[:, 0])
        output: Tensor = self.mix(both)
        return output


def test_uses_and_names_of_one_table_are_added() -> None:
    plain, module, tables, lookups = made(TwoTowers)
    assert tables.shapes == {"users.weight": TableShape(20, 3), "items.weight": TableShape(40, 3)}
    x = torch.tensor([[1, 2], [3, 1], [2, 2]])
    for each in (plain, module):
        each(x).pow(2).sum().backward()
    gradients = tables.gradients()
    assert {name for name, _ in lookups.asked} == set(gradients) == {"users.weight", "items.weight"}
    assert all(len(ids) <= 3 for _, ids in lookups.asked)
    for name, parameter in plain.named_parameters():
        if name in gradients:
            same(gradients[name], sparse_gradient(parameter))
        else:
            torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)
    exact = math.sqrt(sum(float((rows.values.astype(np.float64) ** 2).sum()) for rows in gradients.values()))
    assert norm(gradients) == pytest.approx(exact)
    tables.reset()
    assert tables.gradients() == {}


def test_a_layer_that_has_two_paths_has_two_names() -> None:
    layer = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
    module = nn.ModuleDict({"query": layer, "key": layer, "other": nn.Embedding(NUM_ROWS, WIDTH, sparse=True)})
    expected = {name for name in module.state_dict() if not name.startswith("other")}
    tables = EmbeddingTables(module)
    assert set(tables.names["query.weight"]) == expected == {"query.weight", "key.weight"}
    assert tables.names["query.weight"][0] == "query.weight"


def test_tables_are_not_in_the_flat_vector_and_no_gradient_is_as_large() -> None:
    _, module, tables, _ = made(TwoTowers)
    model = FlatModel(module)
    assert model.shapes == (("mix.weight", (1, 3)), ("mix.bias", (1,)))
    model.module(torch.tensor([[1, 2]])).sum().backward()
    assert all(use.rows.numel() <= 2 * WIDTH for use in tables._uses)
    assert np.abs(model.grad.numpy()).sum() > 0


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: nn.functional.linear(torch.ones(1, WIDTH), weight),
        lambda weight: torch.ones(1, NUM_ROWS) @ weight,
        lambda weight: weight.norm(),
        lambda weight: weight.T,
        lambda weight: torch.ones(NUM_ROWS, WIDTH) * weight,
        lambda weight: torch.cat([torch.ones(1, WIDTH), weight]),
    ],
)
def test_a_weight_that_is_used_elsewhere_is_refused(use: Callable[[Any], object]) -> None:
    layer = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
    EmbeddingTables(layer)
    with pytest.raises(RuntimeError, match="table 'weight': expected its rows to be used through the layer alone"):
        use(layer.weight)


def test_without_gradients_nothing_is_kept() -> None:
    _, module, tables, _ = made(TwoTowers)
    with torch.no_grad():
        module(torch.tensor([[1, 2]]))
    assert tables._uses == []
    module(torch.tensor([[1, 2]]))  # forward, but no backward
    assert tables.gradients() == {}


def test_rows_can_be_a_step_further_on_meanwhile() -> None:
    _, module, tables, lookups = made(lambda: nn.Embedding(NUM_ROWS, WIDTH, sparse=True))
    input, before = torch.tensor([3, 5]), lookups.values["weight"].copy()
    with torch.no_grad(), tables.stepped_by({"weight": Rows(np.array([5, 6]), np.ones((2, WIDTH), np.float32))}, -0.5):
        moved = module(input).numpy()
    assert moved.tolist() == [before[3].tolist(), (before[5] - np.float32(0.5)).tolist()]
    assert module(input).detach().numpy().tolist() == before[[3, 5]].tolist()
    assert lookups.values["weight"].tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("input", "error", "says"),
    [
        (torch.tensor([3, NUM_ROWS]), IndexError, "expected ids of 0 to 19, got 3 to 20"),
        (torch.tensor([-1, 3]), IndexError, "expected ids of 0 to 19, got -1 to 3"),
        (torch.tensor([1.0]), TypeError, r"got torch.float32: .* give the layer x.long\(\)"),
    ],
)
def test_ids_that_are_no_rows_are_refused(input: Tensor, error: type[Exception], says: str) -> None:
    _, module, _, lookups = made(lambda: nn.Embedding(NUM_ROWS, WIDTH, sparse=True))
    with pytest.raises(error, match=says):
        module(input)
    assert lookups.asked == []


def test_a_look_up_comes_first_and_gives_all_rows() -> None:
    module = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
    tables = EmbeddingTables(module)
    with pytest.raises(RuntimeError, match="expected connect"):
        module(torch.tensor([1]))
    tables.connect(lambda name, ids: np.zeros((1, 1), np.float32))
    with pytest.raises(ValueError, match=r"expected rows of shape \(1, 3\), got \(1, 1\)"):
        module(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="expected initial rows of"):
        tables.take_initial()


class OwnForward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


def tied() -> nn.Module:
    module = nn.Module()
    module.embed = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
    module.out = nn.Linear(WIDTH, NUM_ROWS)
    module.out.weight = module.embed.weight
    return module


def half_sparse() -> nn.Module:
    module = nn.Module()
    module.one = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
    module.two = nn.Embedding(NUM_ROWS, WIDTH)
    module.two.weight = module.one.weight
    return module


def normalized() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Embedding(NUM_ROWS, WIDTH, sparse=True)))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: nn.Embedding(NUM_ROWS, WIDTH, sparse=True, max_norm=1.0), "expected max_norm=None, got 1.0"),
        (lambda: nn.EmbeddingBag(NUM_ROWS, WIDTH, sparse=True, mode="max"), "expected mode 'sum' or 'mean', got 'max'"),
        (lambda: nn.Embedding(NUM_ROWS, WIDTH, sparse=True).double(), "expected float32, got torch.float64"),
        (lambda: OwnForward(NUM_ROWS, WIDTH, sparse=True), "OwnForward has a forward of its own"),
        (tied, "table 'embed.weight': .* it is 'out.weight' too"),
        (half_sparse, "it is 'two.weight' too"),
        (normalized, "computed from other parameters"),
        (lambda: nn.Embedding(NUM_ROWS, WIDTH, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    ],
)
def test_layers_that_cannot_be_tables_are_refused(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EmbeddingTables(build())


def test_other_embeddings_stay_as_they_are() -> None:
    module = nn.Sequential(
        nn.Embedding(NUM_ROWS, WIDTH), nn.Embedding.from_pretrained(torch.ones(4, 2), sparse=True), nn.Linear(2, 2)
    )
    assert EmbeddingTables(module).shapes == {}
    assert sorted(name for name, _ in module.named_parameters()) == ["0.weight", "1.weight", "2.bias", "2.weight"]


# --- built without memory ---------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A module that draws random numbers before, for and after its tables."""

    def __init__(self, num_rows: int, width: int, init: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.bag = nn.EmbeddingBag(num_rows, width, mode="sum", sparse=True, padding_idx=0)
        if init is not None:
            init(self.bag.weight)
        self.noise = torch.randn(5)  # no parameter, no buffer
        self.last = nn.Linear(3, 3).requires_grad_(False)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 5000, (1 << 17) + 5, 1 << 18])
@pytest.mark.parametrize(
    "init", [None, nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.zeros_, lambda w: nn.init.normal_(w, 1, 2)]
)
def test_the_rest_is_as_in_a_model_built_in_full(num_rows: int, init: Callable[[Tensor], object] | None) -> None:
    torch.manual_seed(3)
    full = Wide(num_rows, 3, init)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    module = build_without_tables(lambda: Wide(num_rows, 3, init))
    assert isinstance(module, Wide)
    assert module.bag.weight.is_meta
    assert module.noise.equal(full.noise)
    assert module.last.weight.equal(full.last.weight)
    assert torch.get_rng_state().equal(state)
    tables = EmbeddingTables(module)
    assert tables.shapes == {"bag.weight": TableShape(num_rows, 3)}
    with pytest.raises(RuntimeError, match=r"expected initial rows of \['bag.weight'\], got those of \[\]"):
        tables.take_initial()
    assert not nn.EmbeddingBag(3, 3, sparse=True).weight.is_meta, "only meanwhile"


@pytest.mark.parametrize(
    "init",
    [
        lambda weight: weight.data.add_(float(weight.mean().item())),  # looks at the values
        lambda weight: weight.data.exponential_(),  # draws in a way that is not counted
        nn.init.trunc_normal_,  # does nothing without memory
        lambda weight: weight.data.copy_(torch.ones(len(weight), len(weight)) @ weight.data),
        lambda weight: weight.data.copy_(torch.ones_like(weight.to("cpu"))),
    ],
)
def test_a_table_that_must_have_memory_has_it(init: Callable[[Tensor], object]) -> None:
    torch.manual_seed(3)
    full = Wide(50, 3, init)
    torch.manual_seed(3)
    module = build_without_tables(lambda: Wide(50, 3, init))
    assert isinstance(module, Wide)
    assert module.bag.weight.equal(full.bag.weight)
    assert module.last.weight.equal(full.last.weight)


class Frozen(nn.Module):
    """An embedding that does not learn, or what is computed from one that does, beside a table."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        self.other = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
        if kind == "frozen":
            self.other.weight.requires_grad_(False)
        elif kind == "buffer":
            self.register_buffer("center", self.other.weight.detach().mean(0))
        else:
            self.centers = [self.other.weight.detach().mean(0)]

    def numbers(self) -> list[Tensor]:
        return [self.other.weight, *self.buffers(), *getattr(self, "centers", [])]


@pytest.mark.parametrize("kind", ["frozen", "buffer", "attribute"])
def test_what_is_no_table_has_memory(kind: str) -> None:
    torch.manual_seed(3)
    full = Frozen(kind)
    torch.manual_seed(3)
    module = build_without_tables(lambda: Frozen(kind))
    assert isinstance(module, Frozen)
    assert all(got.equal(expected) for got, expected in zip(module.numbers(), full.numbers(), strict=True))


def test_rows_that_were_given_are_kept() -> None:
    module = build_without_tables(lambda: nn.EmbeddingBag.from_pretrained(torch.ones(4, 2), freeze=False, sparse=True))
    assert EmbeddingTables(module).take_initial()["weight"].tolist() == [[1, 1]] * 4


def test_what_building_raises_is_raised() -> None:
    def fail() -> nn.Module:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_without_tables(fail)


def test_initial_rows_are_not_copied() -> None:
    layer = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)
    memory = layer.weight.detach().numpy()
    assert np.shares_memory(EmbeddingTables(layer).take_initial()["weight"], memory)

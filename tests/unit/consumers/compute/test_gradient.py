"""Algorithm 2: the sum of the samples' gradients at exactly the given weights, and the buffers after the batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from doll.config import SgdConfig, parse
from doll.config.fingerprint import difference
from doll.consumers.compute.gradient import Gradient, GradientComputer, GradientSum
from doll.errors import ConfigError, IllegalEventError, TaskError
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.optim.optimizer import Optimizer
from doll.task.base import Sample, Task
from doll.task.batches import SampleBatch
from examples.synthetic.task import Gaussian
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch


class Classes(Task):
    input_shape = (5,)
    num_classes = 3

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


class Values(Task):
    input_shape = (5,)

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


def mlp(out: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, out))


def normed(out: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, out))


def data(n: int, classes: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    return x, rng.integers(0, 3, n) if classes else rng.normal(size=n)


def plain(module: torch.nn.Module, x: np.ndarray, y: np.ndarray, classes: bool) -> tuple[np.ndarray, float]:
    """The gradient of the summed loss by torch alone, parameters one after another; and that loss."""
    output = module(torch.from_numpy(x))
    if classes:
        loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(y), reduction="sum")
    else:
        target = torch.from_numpy(y.astype(np.float32))
        loss = torch.nn.functional.mse_loss(output[:, 0], target, reduction="sum")
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return np.concatenate([gradient.numpy().ravel() for gradient in gradients]), float(loss.detach())


@pytest.mark.parametrize("make", [mlp, normed])
@pytest.mark.parametrize("classes", [True, False], ids=["classes", "values"])
@pytest.mark.parametrize("n", [2, 7, 64])
def test_it_equals_a_plain_torch_computation_of_the_summed_loss(
    make: Callable[[int], torch.nn.Module], classes: bool, n: int
) -> None:
    torch.manual_seed(0)
    module = make(3 if classes else 1)
    reference = copy.deepcopy(module).train()
    model = FlatModel(module)
    computer = GradientComputer(Classes() if classes else Values(), model)
    x, y = data(n, classes)
    gradient = computer.compute(x, y)
    expected, loss = plain(reference, x, y, classes)
    parameters = model.num_parameters
    np.testing.assert_allclose(gradient.values[:parameters], expected, rtol=2e-4, atol=2e-5)
    assert gradient.loss_sum == pytest.approx(loss, rel=1e-5)
    buffers = [b.numpy().ravel() for _, b in reference.named_buffers() if b.is_floating_point()]
    floats = gradient.values[parameters : model.num_floats]
    np.testing.assert_allclose(floats, n * np.concatenate([*buffers, np.zeros(0)]), rtol=1e-5)
    if classes:
        hits = (reference(torch.from_numpy(x)).argmax(1).numpy() == y).sum()
        assert gradient.metric_sums["accuracy"] == pytest.approx(hits)
    else:
        assert gradient.metric_sums == {}


def test_every_batch_begins_from_the_loaded_weights_and_buffers() -> None:
    """The replica's running statistics move with each batch; the next load puts them back."""
    torch.manual_seed(0)
    computer = GradientComputer(Classes(), FlatModel(normed(3)))
    weights = computer.weights.copy()
    x, y = data(16, True)
    computer.load(weights)
    first = computer.compute(x, y).values.copy()
    computer.compute(*data(16, True, seed=1))
    computer.load(weights)
    assert computer.compute(x, y).values.tobytes() == first.tobytes()


def test_weights_are_taken_over_to_the_bit_and_used() -> None:
    torch.manual_seed(0)
    computer = GradientComputer(Classes(), FlatModel(mlp(3)))
    x, y = data(8, True)
    before = computer.compute(x, y)
    loss = before.loss_sum
    weights = np.random.default_rng(1).normal(size=computer.weights.size).astype(np.float32)
    computer.load(weights)
    assert computer.weights.tobytes() == weights.tobytes()
    assert computer.compute(x, y).loss_sum != loss
    assert computer.weights.tobytes() == weights.tobytes()  # computing does not learn


@pytest.mark.parametrize("size", [1, 3])
def test_weights_of_another_size_are_refused(size: int) -> None:
    computer = GradientComputer(Classes(), FlatModel(mlp(3)))
    before = computer.weights.copy()
    with pytest.raises(ValueError, match="expected weights of shape"):
        computer.load(np.zeros(size, np.float32))
    assert computer.weights.tobytes() == before.tobytes()


def test_a_flat_model_is_one_vector_that_its_module_lives_in() -> None:
    model = FlatModel(normed(3))
    assert (model.num_parameters, model.num_buffers) == (5 * 4 + 4 + 4 + 4 + 4 * 3 + 3, 8)
    with torch.no_grad():
        model.flat.fill_(0.5)
    assert all((p == 0.5).all() for p in model.module.parameters())
    assert (model.module[1].running_mean == 0.5).all()  # type: ignore[index]


def with_dense(layer: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), layer)


class _Complex(torch.nn.Module):
    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(3, 1)
        self.pad = torch.nn.Buffer(torch.tensor(3))  # the next buffer begins at a multiple of 8 bytes, not of 16
        turn = torch.ones(3, dtype=torch.complex128)
        self.turn = torch.nn.Parameter(turn) if trained else torch.nn.Buffer(turn)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.nn.Flatten, "no trainable parameter"),
        (
            lambda: torch.nn.Linear(2, 2).double(),
            r"expected float32 parameters, got torch.float64 for 'weight': return model.float\(\)",
        ),
        (lambda: with_dense(torch.nn.BatchNorm1d(2, affine=False).half()), "got torch.float16 for '1.running_mean'"),
        (lambda: _Complex(trained=True), "got torch.complex128 for 'turn': keep it as torch.view_as_real"),
        (lambda: _Complex(trained=False), r"at most 8 bytes each, got torch.complex128 for 'turn': .* complex64"),
        (
            lambda: torch.nn.Sequential(torch.nn.LazyLinear(2)),
            r"got '0.weight', which LazyLinear has not made yet: use the layer that is told its sizes",
        ),
        (
            lambda: with_dense(torch.nn.LazyBatchNorm1d(affine=False)),
            "'1.running_mean', which LazyBatchNorm1d",
        ),
        (
            lambda: torch.nn.Linear(2, 2, device="meta"),
            "got 'weight' on the device meta: build Linear on the device cpu",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_here_is_refused(make: Callable[[], torch.nn.Module], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FlatModel(make())

    class Given(Gaussian):
        def build_model(self) -> torch.nn.Module:
            return make()

    with pytest.raises(ConfigError, match=said):  # where every command sees a model first
        build(parse(JOB), Given(hidden=(4,)))


JOB = "job: j\ntask: {class: 'examples.synthetic.task:Gaussian'}\n"


def test_every_process_builds_the_same_model_and_knows_when_it_is_another() -> None:
    config = parse(JOB)
    one, other = (build(config, Gaussian(hidden=(4,))) for _ in range(2))
    assert one.flat.numpy().tobytes() == other.flat.numpy().tobytes()
    assert fingerprint(config, one) == fingerprint(config, other)
    reseeded = build(parse(JOB, ["seed=1"]), Gaussian(hidden=(4,)))
    assert reseeded.flat.numpy().tobytes() != one.flat.numpy().tobytes()
    assert fingerprint(config, reseeded) == fingerprint(config, one)
    wider = build(config, Gaussian(hidden=(5,)))
    text = difference(fingerprint(config, one), fingerprint(parse(JOB, ["data.batch_size=32"]), wider))
    assert "parameters: expected 94, got 117" in text
    assert "batch_size: expected 64, got 32" in text
    assert "workers" not in text
    assert "seed" not in text


def test_a_single_usable_sample_is_learned_from_by_a_model_with_batch_norm() -> None:
    """A batch may be left with one sample when the others were refused; torch would raise."""
    model = FlatModel(normed(3))
    computer = GradientComputer(Classes(), model)
    buffers = computer.weights[model.num_parameters :].copy()
    one = computer.compute(*data(1, classes=True))
    assert np.isfinite(one.values).all()
    assert np.any(one.values[: model.num_parameters])
    np.testing.assert_array_equal(one.values[model.num_parameters :], buffers)
    two = computer.compute(*data(2, classes=True))
    assert np.any(two.values[model.num_parameters :] != 2 * buffers), "with two samples the statistics move again"


class Counting(torch.nn.Module):
    """Buffers of every kind: statistics, a counter that decides, a mask, one that is replaced and not written into."""

    seen: torch.Tensor
    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(5, momentum=None)  # its mean is over `num_batches_tracked` batches
        self.register_buffer("mask", torch.tensor([True, False, True, True, True]))
        self.register_buffer("seen", torch.tensor((1 << 40) + 1))
        self.register_buffer("level", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)
        self.level = 0.5 * self.level + x.mean()
        return self.layer(self.norm(x) * self.mask)


def test_a_second_batch_at_the_same_version_begins_with_the_versions_buffers() -> None:
    torch.manual_seed(0)
    model = FlatModel(Counting())
    computer = GradientComputer(Classes(), model)
    before = computer.weights.copy()
    x, y = data(16, True)
    first = computer.compute(x, y).values.copy()
    computer.compute(*data(16, True, seed=1))
    assert computer.weights.tobytes() == before.tobytes()
    assert computer.compute(x, y).values.tobytes() == first.tobytes()
    bad = x.copy()[:, :4]
    with pytest.raises(RuntimeError):
        computer.compute(bad, y)
    assert computer.weights.tobytes() == before.tobytes()


def test_every_buffer_belongs_to_the_version_and_reaches_the_next_process() -> None:
    torch.manual_seed(0)
    server, worker = FlatModel(Counting()), FlatModel(Counting())
    optimizer = Optimizer(server, SgdConfig(lr=0.1))
    computer = GradientComputer(Classes(), worker)
    reference = Counting().train()
    for version in range(3):
        computer.load(optimizer.weights)
        gradients = [computer.compute(*data(16, True, seed=2 * version + k)).values.copy() for k in range(2)]
        optimizer.apply(gradients, 1 / 32, 32)
    reference.norm(torch.from_numpy(data(16, True, seed=0)[0]))
    state = server.module.state_dict()
    assert state["seen"] == (1 << 40) + 1 + 3 * 16
    assert state["norm.num_batches_tracked"] == 3
    assert state["mask"].tolist() == [True, False, True, True, True]
    means = [np.mean([data(16, True, seed=2 * v + k)[0].mean(axis=0) for k in range(2)], axis=0) for v in range(3)]
    np.testing.assert_allclose(state["norm.running_mean"], np.mean(means, axis=0), rtol=1e-5)
    assert state["level"].abs().max() > 0
    restored = FlatModel(Counting())
    Optimizer(restored, SgdConfig(lr=0.1)).load(optimizer.tensors())
    for name, tensor in restored.module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


class Frozen(Classes):
    def __init__(self, value: float) -> None:
        self.value = value

    def build_model(self) -> torch.nn.Module:
        model = mlp(3)
        model[0].requires_grad_(False).weight.data.fill_(self.value)  # type: ignore[index]
        return model


def test_frozen_parameters_are_fingerprinted() -> None:
    config = parse(JOB)
    one, other = (fingerprint(config, build(config, Frozen(value))) for value in (1.0, 2.0))
    assert one != other
    text = difference(one, other)
    assert "frozen: expected" in text
    assert "build_model() must give the same frozen parameters" in text
    assert "frozen" not in fingerprint(config, build(config, Gaussian()))


# --- the sum of a set -------------------------------------------------------------------------------------------------


def gradient_of(value: float, norm: float = 1.0) -> Gradient:
    """Three parameters, two float buffers, and four bytes that are not of floats."""
    return Gradient(torch.full((6,), value), 0.0, {}, 1.0, norm)


def test_the_memory_behind_the_floats_is_that_of_the_last_gradient() -> None:
    total = GradientSum(3, 5)
    counters = np.array([7, 9], np.int32).view(np.float32)
    for batch, number in enumerate(counters):
        one = gradient_of(1.0)
        one.values[5] = number
        total.keep()
        assert total.add(one, batch=batch)
    values = total.values()
    assert values is not None
    assert values[:5].tolist() == [2.0] * 5
    assert values[5:].tobytes() == counters[-1:].tobytes()


def test_a_gradient_that_float32_may_not_hold_the_sum_of_is_not_added() -> None:
    total = GradientSum(3, 5)
    assert total.add(gradient_of(3e38, norm=3e38), batch=0), "one alone is always taken"
    assert not total.add(gradient_of(3e38, norm=3e38), batch=1)
    assert [batch for batch, _ in total.holds] == [0]
    values = total.values()
    assert values is not None
    assert values[:5].tolist() == [np.float32(3e38)] * 5
    assert total.begin(grant(0))
    assert total.values() is None
    assert total.add(gradient_of(1.0), batch=0)
    assert not total.add(gradient_of(2e38, norm=1.0), batch=1), "a buffer counts too"


def test_a_sum_says_what_it_holds_and_takes_no_batch_twice() -> None:
    total = GradientSum(3, 5)
    assert total.begin(grant(4, 9, 10))
    assert total.add(gradient_of(1.0), batch=4)
    total.keep()
    total.skip(5)
    assert total.holds == ((4, 9), (5, 10))
    for batch in (4, 5):
        with pytest.raises(IllegalEventError, match="expected a batch after 5"):
            total.add(gradient_of(1.0), batch=batch)
    assert total.rest(0) is None
    assert total.holds == ()


class Heads(torch.nn.Module):
    """Which of two heads a batch uses depends on it; forward may also forget the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = torch.nn.Linear(5, 4), torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.forgets = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forgets:
            self.zero_grad()
        head = self.left if x[0, 0] > 0.3 else self.right
        output: torch.Tensor = head(torch.tanh(self.body(x)))
        return output


@pytest.mark.parametrize("forgets", [False, True])
def test_a_parameter_that_no_sample_has_used_is_absent_from_the_gradient_and_from_a_sum(forgets: bool) -> None:
    torch.manual_seed(0)
    model, names = FlatModel(Heads()), [name for name, _ in Heads().named_parameters()]
    model.module.forgets = forgets  # type: ignore[assignment]
    computer, total = GradientComputer(Classes(), model), GradientSum(model.num_parameters, model.num_floats)
    seen = set()
    total.begin(grant(0, *range(4)))
    for number in range(4):
        x, y = data(8, True, seed=number)
        plain_model = Heads()
        plain_model.load_state_dict(model.module.state_dict())
        torch.nn.functional.cross_entropy(plain_model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        gradient = computer.compute(x, y)
        absent = {name for at, name in enumerate(names) if gradient.absent >> at & 1}
        assert absent == {name for name, parameter in plain_model.named_parameters() if parameter.grad is None}
        flat = [torch.zeros(p.numel()) if p.grad is None else 8 * p.grad.flatten() for p in plain_model.parameters()]
        np.testing.assert_allclose(gradient.values, torch.cat(flat), atol=1e-5)
        seen.add(frozenset(absent))
        assert total.add(gradient, batch=number)
    assert len(seen) == 2
    assert total.absent == 1 << names.index("unused")


class Positions(torch.nn.Module):
    """A cache in a buffer that grows with the longest sequence so far, as in many public transformers."""

    cache: torch.Tensor

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.embed, self.out, self.persistent = torch.nn.Embedding(20, 4), torch.nn.Linear(4, 3), persistent
        self.make(6)

    def make(self, length: int) -> None:
        cache = torch.sin(torch.arange(length)[:, None] / 10.0 ** (torch.arange(4) / 4))
        self.register_buffer("cache", cache, persistent=self.persistent)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if words.shape[1] > len(self.cache):
            self.make(words.shape[1])
        output: torch.Tensor = self.out((self.embed(words.long()) + self.cache[: words.shape[1]]).mean(1))
        return output


def words(length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(length)
    return rng.integers(0, 20, (8, length)), rng.integers(0, 3, 8)


def test_a_cache_that_grows_gives_the_gradients_of_torch() -> None:
    torch.manual_seed(0)
    model = FlatModel(Positions(persistent=False))
    before, computer = model.flat.clone(), GradientComputer(Classes(), model)
    theirs = Positions(persistent=False)
    theirs.load_state_dict(model.module.state_dict())
    for length in (5, 9, 3, 6, 12, 4):
        x, y = words(length)
        theirs.zero_grad()
        (8 * torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y))).backward()
        expected = torch.cat([p.grad.flatten() for p in theirs.parameters() if p.grad is not None])
        np.testing.assert_allclose(computer.compute(x, y).values[: model.num_parameters], expected, atol=1e-5)
    assert torch.equal(model.flat, before), "what all processes share is as it was"


def test_a_buffer_of_the_model_that_grows_is_refused_by_name() -> None:
    computer = GradientComputer(Classes(), FlatModel(torch.nn.Sequential(Positions(persistent=True))))
    computer.compute(*words(6))
    with pytest.raises(TaskError, match=r"buffer '0.cache' has shape \(9, 4\) after a pass, and \(6, 4\) when build_"):
        computer.compute(*words(9))
    computer.compute(*words(5))


class Late(torch.nn.Linear):
    """Statistics that the first batch makes: no other process would have them."""

    level: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "level"):
            self.register_buffer("level", x.mean(0))
        return super().forward(x - self.level)


def test_a_buffer_that_the_first_batch_makes_is_refused_by_name() -> None:
    computer = GradientComputer(Classes(), FlatModel(Late(5, 3)))
    with pytest.raises(TaskError, match=r"buffer 'level' has shape \(5,\) after a pass, and None when"):
        computer.compute(*data(8, True))


class Noisy(Classes):
    """Torch, numpy and Python draw."""

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x) * (1 + random.random()) + torch.from_numpy(np.random.rand(1)).float()
        return output


def test_the_random_numbers_of_a_pass_are_those_of_its_seed() -> None:
    torch.manual_seed(0)
    model = FlatModel(torch.nn.Sequential(mlp(3), torch.nn.Dropout(0.5)))
    computer = GradientComputer(Noisy(), model)
    made = []
    for seed in (1, 2, 1):
        computer.seed = seed
        made.append(computer.compute(*data(16, True)).values.tobytes())
    assert made[0] == made[2] != made[1]


class Scored(Task):
    num_classes = 3

    def build_model(self) -> torch.nn.Module:
        layers = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        return torch.nn.Sequential(*layers)

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target, reduction="none")


def test_held_out_samples_are_scored_in_evaluation_mode_and_change_nothing() -> None:
    torch.manual_seed(1)
    task = Scored()
    module = task.build_model()
    computer = GradientComputer(task, FlatModel(module))
    x, y = data(12, True)
    weight = np.linspace(0.5, 2.0, 12, dtype=np.float32)
    batch = SampleBatch(x, y, weight)
    before = computer.weights.copy()
    score = computer.score(batch, 7)
    assert score is not None
    assert score == computer.score(batch, 8)
    assert np.array_equal(computer.weights, before)
    module.eval()
    with torch.no_grad():
        output = module(torch.from_numpy(x))
    losses = torch.nn.functional.cross_entropy(output, torch.from_numpy(y), reduction="none").double().numpy()
    assert score.loss_sum == pytest.approx(float(losses @ weight), rel=1e-6)
    right = (output.argmax(dim=1).numpy() == y) @ weight.astype(float)
    assert score.metric_sums == {"accuracy": pytest.approx(right)}
    assert (score.n_samples, score.weight) == (12, pytest.approx(weight.sum()))


def test_held_out_samples_on_which_the_model_fails_have_no_score() -> None:
    torch.manual_seed(1)
    computer = GradientComputer(Scored(), FlatModel(Scored().build_model()))
    x, y = data(4, True)
    assert computer.score(SampleBatch(x, np.array([0, 1, 2, 9])), 7) is None
    x[2] = np.inf
    assert computer.score(SampleBatch(x, y), 7) is None
    assert np.isfinite(computer.compute(*data(4, True)).values).all()


def test_a_fault_of_the_task_ends_the_score_as_it_ends_a_gradient() -> None:
    class Wrong(Scored):
        def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return output

    torch.manual_seed(1)
    computer = GradientComputer(Wrong(), FlatModel(Wrong().build_model()))
    with pytest.raises(TaskError, match="one loss for each"):
        computer.score(SampleBatch(*data(4, True), np.full(4, 2.0, np.float32)), 7)

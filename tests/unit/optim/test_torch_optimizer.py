"""A torch optimizer class with groups, schedule and clipping equals a plain torch loop, to the bit, over restarts."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll.config import TrainingConfig
from doll.errors import CheckpointError, ConfigError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import AVERAGE, DivergedError, Optimizer
from doll.optim.recipe import check_recipe, make_optimizer
from doll.ps.model.updater import measured
from doll.storage.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from doll.tables.embedding_tables import EmbeddingTables
from torch.optim import lr_scheduler as schedulers

pytestmark = pytest.mark.slow  # loads torch, and its compiler

SAMPLES = 24
NO_DECAY = r"bias$|norm"
WARM_UP: list[dict[str, Any]] = [
    {"class": "torch.optim.lr_scheduler.LinearLR", "args": {"start_factor": 0.1, "total_iters": 4}, "updates": 4},
    {"class": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": 10}},
]


def module() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        *(torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9)),
        torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(9)}),
        torch.nn.Linear(9, 3),
    )


def model() -> FlatModel:
    return FlatModel(module())


def training(optimizer: Any, **more: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"optimizer": optimizer, **more})


def named(cls: str, groups: Any = None, /, **args: Any) -> dict[str, Any]:
    return {"class": f"torch.optim.{cls}", "args": args, "groups": groups or {}}


def scheduled(cls: str, **args: Any) -> dict[str, Any]:
    return {"class": f"torch.optim.lr_scheduler.{cls}", "args": args}


def sums(numel: int, seed: int) -> list[npt.NDArray[np.float32]]:
    """Of two sets; longer and shorter than what is clipped."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=numel, scale=(1, 10)[seed % 2]).astype(np.float32) for _ in range(2)]


def restarted(ours: Optimizer, config: TrainingConfig) -> Optimizer:
    """As a server that begins from the bytes of a checkpoint."""
    checkpoint = Checkpoint(job="j", fingerprint="", term=1, version=1, state=b"", tensors=ours.tensors())
    successor = make_optimizer(config, model())
    successor.load(decode_checkpoint(b"".join(map(bytes, encode_checkpoint(checkpoint)))).tensors)
    return successor


Plain = Callable[[Iterable[Any]], torch.optim.Optimizer]
PLAIN: dict[str, tuple[dict[str, Any], Plain]] = {
    "AdamW": (
        named("AdamW", {NO_DECAY: {"weight_decay": "0e0"}}, lr=3e-2, betas=[0.9, 0.95], weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1),
    ),
    "AdamW, fused": (
        named("AdamW", {NO_DECAY: {"weight_decay": 0.0}}, lr="3e-2", weight_decay=0.1, fused=True),
        lambda groups: torch.optim.AdamW(groups, lr=3e-2, weight_decay=0.1, fused=True),
    ),
    "SGD": (
        named("SGD", {NO_DECAY: {"weight_decay": 0.0}}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "NAdam": (
        named("NAdam", {NO_DECAY: {"weight_decay": 0.0}}, lr=0.01, weight_decay=0.1),
        lambda groups: torch.optim.NAdam(groups, lr=0.01, weight_decay=0.1),
    ),
    "Adafactor": (
        named("Adafactor", {NO_DECAY: {"weight_decay": 0.0}}, lr=0.1, weight_decay=0.1),
        lambda groups: torch.optim.Adafactor(groups, lr=0.1, weight_decay=0.1),
    ),
    "RMSprop": (
        named("RMSprop", {NO_DECAY: {"weight_decay": 0.0}}, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1),
        lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1),
    ),
}
CLIP: dict[str, Callable[[Any], Any]] = {
    "clip_norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
    "clip_value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.5),
}


def plain_warm_up(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
    parts: list[schedulers.LRScheduler] = [
        schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=4),
        schedulers.CosineAnnealingLR(optimizer, T_max=10),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.parametrize("clip", CLIP)
@pytest.mark.parametrize("name", PLAIN)
def test_it_equals_a_plain_loop_over_restarts(name: str, clip: str) -> None:
    """In memory of its own and in memory that is given, as a server gives it that publishes from shared memory."""
    optimizer, make = PLAIN[name]
    config = training(optimizer, schedule=WARM_UP, **{clip: 0.5})
    check_recipe(config, model())
    ours, theirs = make_optimizer(config, model()), module()
    decays = [p for key, p in theirs.named_parameters() if "norm" not in key and not key.endswith("bias")]
    others = [p for key, p in theirs.named_parameters() if "norm" in key or key.endswith("bias")]
    plain = make([{"params": decays}, {"params": others, "weight_decay": 0.0}])
    schedule = plain_warm_up(plain)
    for step in range(12):
        if step % 3 == 2:
            ours = restarted(ours, config)
        gradients = sums(len(ours.weights), step)
        ours.apply(gradients, 1 / SAMPLES, SAMPLES, np.empty_like(ours.weights) if step % 5 < 3 else None)
        mean = torch.from_numpy(gradients[0] + gradients[1]) * (1 / SAMPLES)
        at = 0
        for parameter in theirs.parameters():
            parameter.grad = mean[at : (at := at + parameter.numel())].view(parameter.shape).clone()
        CLIP[clip](list(theirs.parameters()))
        plain.step()
        schedule.step()
        flat = torch.cat([parameter.detach().flatten() for parameter in theirs.parameters()])
        assert ours.weights[: ours.num_parameters].tobytes() == flat.numpy().tobytes(), step


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_a_schedule_of_a_built_in_one_equals_torchs(name: str) -> None:
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    config = training({"name": name, "lr": 0.1}, schedule=WARM_UP)
    check_recipe(config, model())
    ours = make_optimizer(config, model())
    theirs = torch.nn.Parameter(torch.from_numpy(ours.weights[: ours.num_parameters].copy()))
    plain = classes[name]([theirs], lr=0.1)
    schedule = plain_warm_up(plain)
    for step in range(12):
        if step % 3 == 2:
            ours = restarted(ours, config)
        (gradient, _) = sums(len(ours.weights), step)
        ours.apply([gradient], 1 / SAMPLES, SAMPLES)
        theirs.grad = torch.from_numpy(gradient[: ours.num_parameters]) * (1 / SAMPLES)
        plain.step()
        schedule.step()
        assert ours.weights[: ours.num_parameters].tobytes() == theirs.detach().numpy().tobytes(), step


def test_one_cycle_moves_momentum_and_stays_where_it_ends() -> None:
    cycle = scheduled("OneCycleLR", max_lr=0.2, total_steps=6)
    for optimizer in (named("SGD", lr=0.1, momentum=0.9), {"name": "sgd", "lr": 0.1, "momentum": 0.9}):
        config = training(optimizer, schedule=cycle)
        check_recipe(config, model())
        ours = make_optimizer(config, model())
        theirs = torch.nn.Parameter(torch.from_numpy(ours.weights[: ours.num_parameters].copy()))
        plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
        schedule = schedulers.OneCycleLR(plain, max_lr=0.2, total_steps=6)
        for step in range(10):
            ours = restarted(ours, config)
            (gradient, _) = sums(len(ours.weights), step)
            ours.apply([gradient], 1 / SAMPLES, SAMPLES)
            theirs.grad = torch.from_numpy(gradient[: ours.num_parameters]) * (1 / SAMPLES)
            plain.step()
            if step < 6:
                schedule.step()
            assert ours.weights[: ours.num_parameters].tobytes() == theirs.detach().numpy().tobytes(), step


def test_an_update_that_has_learned_nothing_is_no_step_of_the_schedule() -> None:
    config = training(
        named("SGD", lr=1.0), schedule={"class": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1}}
    )
    ours = make_optimizer(config, model())
    gradient = np.ones_like(ours.weights)
    moved = []
    for contributions in ([gradient], [], [], [gradient]):
        before = ours.weights.copy()
        ours.apply(contributions, 1.0, len(contributions))
        moved.append(round(float(before[0] - ours.weights[0]), 4))
    assert moved == [1.0, 0.0, 0.0, 0.1]


def test_a_worker_has_the_rates_of_its_version() -> None:
    """Also where the server has gone back to an earlier checkpoint."""
    policy = {"name": "ssp", "staleness": 1}
    schedule = scheduled("StepLR", step_size=2, gamma=0.5)
    for optimizer in (named("SGD", lr=1.0), {"name": "sgd", "lr": 1.0}):
        ours = make_optimizer(training(optimizer, policy=policy, schedule=schedule), model())
        gradient = np.ones_like(ours.weights)
        moved = []
        for version in (0, 1, 2, 2, 7, 3):
            before = ours.weights.copy()
            ours.go_to(version)
            ours.apply([gradient], 1.0, 1)
            moved.append(round(float(before[0] - ours.weights[0]), 4))
        assert moved == [1.0, 1.0, 0.5, 0.5, 0.125, 0.5]


@pytest.mark.parametrize("optimizer", [named("AdamW", lr=0.1), {"name": "adam", "lr": 0.1}])
def test_the_average_follows_the_weights_and_copies_buffers(optimizer: Any) -> None:
    config = training(optimizer, ema={"decay": 0.75})
    ours = make_optimizer(config, model())
    n = ours.num_parameters
    expected = torch.from_numpy(ours.weights.copy())
    for step in range(6):
        if step == 3:
            ours = restarted(ours, config)
        ours.apply(sums(len(ours.weights), step), 1 / SAMPLES, SAMPLES, np.empty_like(ours.weights))
        weights = torch.from_numpy(ours.weights.copy())
        expected[:n].lerp_(weights[:n], 0.25)
        expected[n:] = weights[n:]
        assert ours.tensors()[AVERAGE].tobytes() == expected.numpy().tobytes()
    ours.apply([], 1.0, 0)
    assert ours.tensors()[AVERAGE].tobytes() == expected.numpy().tobytes(), "nothing was learned"


def test_an_average_begins_at_the_weights_of_a_checkpoint_without_one() -> None:
    before = make_optimizer(training({"name": "sgd"}), model())
    before.apply(sums(len(before.weights), 1), 1.0, 1)
    assert AVERAGE not in before.tensors()
    ours = restarted(before, training({"name": "sgd"}, ema={"decay": 0.5}))
    assert ours.tensors()[AVERAGE].tobytes() == before.weights.tobytes()


class Bf16Momentum(torch.optim.Optimizer):
    """State of a type that numpy has not, a number that is no tensor, and a value of the group that moves."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p, dtype=torch.bfloat16)) * 0.9 + p.grad.bfloat16()
                state["count"] = state.get("count", 0) + 1
                p -= group["lr"] * state["mean"].float() / (state["count"] + group["seen"])


class KeepsElsewhere(torch.optim.SGD):
    """Its second step is another one, and no state says so."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps = self.steps + 1
        self.param_groups[0]["lr"] = 0.1
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0] += self.steps


class Draws(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0] += torch.randn(1)


class KeepsObjects(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["thing"] = object()


PLATEAU = {
    "class": "torch.optim.lr_scheduler.ReduceLROnPlateau", "args": {"factor": 0.5, "patience": 1},
    "metric": "loss", "every_updates": 3,
}  # fmt: skip


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "lr": 0.01}, named("SGD", lr=0.01)])
def test_a_plateau_of_the_measured_loss_lowers_the_rate_as_torch_does_also_through_restarts(
    optimizer: dict[str, Any],
) -> None:
    config = training(optimizer, schedule=PLATEAU)
    check_recipe(config, model())
    ours = make_optimizer(config, model())
    assert ours.metric == "loss"
    losses = [3.0, 2.0, 1.0, *[1.5] * 30]
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=0.5, patience=1)
    for step, loss in enumerate(losses, 1):
        before = ours.weights.copy()
        gradient = np.ones(len(before), np.float32)
        ours.measure(loss * SAMPLES, SAMPLES)
        ours.apply([gradient], 1.0, SAMPLES)
        change = (before - ours.weights)[: ours.num_parameters]
        np.testing.assert_allclose(change, theirs.param_groups[0]["lr"], rtol=1e-3)
        theirs.step()
        if step % 3 == 0:
            scheduler.step(float(np.mean(losses[step - 3 : step])))
        ours = restarted(ours, config)
    assert theirs.param_groups[0]["lr"] < 0.005


def test_without_a_measurement_a_plateau_changes_nothing_and_a_set_without_the_metric_does_not_count() -> None:
    ours = make_optimizer(
        training({"name": "sgd", "lr": 0.01}, schedule={**PLATEAU, "metric": "auc", "every_updates": 1}), model()
    )
    for _ in range(5):
        before = ours.weights.copy()
        ours.measure(0.0, 0.0)
        ours.apply([np.ones(len(before), np.float32)], 1.0, SAMPLES)
        np.testing.assert_allclose((before - ours.weights)[: ours.num_parameters], 0.01, rtol=1e-3)
    batch = namedtuple("batch", "loss_sum metric_sums")
    push = namedtuple("push", "batches")
    item = namedtuple("item", "push weight")
    update: Any = namedtuple("Update", "sets")(
        [
            item(push([batch(2.0, {"auc": 1.0}), batch(4.0, {"auc": 0.5})]), 3.0),
            item(push([batch(1.0, {})]), 2.0),
        ]
    )  # fmt: skip
    assert measured(update, "loss") == (7.0, 5.0)
    assert measured(update, "auc") == (1.5, 3.0)


def test_state_of_any_type_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    config = training({"class": f"{__name__}.Bf16Momentum"})
    check_recipe(config, model())
    one = other = make_optimizer(config, model())
    for step in range(4):
        other = restarted(other, config) if step else make_optimizer(config, model())
        for ours in (one, other):
            ours.apply(sums(len(ours.weights), step), 1 / SAMPLES, SAMPLES)
        assert one.weights.tobytes() == other.weights.tobytes()
        assert {key: value.tobytes() for key, value in one.tensors().items()} == {
            key: value.tobytes() for key, value in other.tensors().items()
        }


OPTIMIZER, SCHEDULE = r"training\.optimizer.", r"training\.schedule\."
REFUSED_OPTIMIZERS: list[tuple[dict[str, Any], str]] = [
    (named("AdamWW"), r"class: 'torch\.optim' has no class 'AdamWW' \(did you mean 'AdamW'\?\)"),
    ({"class": "no_such_package.Adam"}, r"class: cannot import 'no_such_package'"),
    ({"class": "torch.nn.Linear"}, r"class: expected a subclass of torch\.optim"),
    (named("AdamW", learning_rate=1), r"args: torch\.optim\.AdamW does not take .*expected lr=0\.001, betas="),
    (named("AdamW", lr=-1.0), r"args: .*Invalid learning rate"),
    (named("AdamW", {"bias": {"decay": 0}}), r"groups\.bias: torch\.optim\.AdamW has no 'decay': expected some of lr"),
    (named("AdamW", {"embed": {}}), r"groups: .* is found .* got 'embed'; parameters: 0\.weight, 0\.bias"),
    (named("AdamW", {"bias": {}, "bias$": {}}), r"groups: .*got 'bias\$', and earlier ones have all"),
    (named("LBFGS"), r"class: .*needs dense gradients alone; torch\.optim\.LBFGS failed .*closure"),
    (named("SparseAdam"), r"class: .*torch\.optim\.SparseAdam failed in a trial: .*dense"),
    ({"class": f"{__name__}.KeepsElsewhere"}, r"class: .*keeps all that it needs in `state` and `param_groups`"),
    ({"class": f"{__name__}.Draws"}, r"class: .*draws no random numbers"),
    ({"class": f"{__name__}.KeepsObjects"}, r".*expected classes whose state is tensors, numbers and texts"),
]
REFUSED_SCHEDULES: list[tuple[Any, str]] = [
    (scheduled("StepLr"), r"class: .*has no class 'StepLr' \(did you mean 'StepLR'"),
    (scheduled("StepLR"), r"args: .*StepLR does not take \{\}.*expected step_size"),
    (scheduled("ReduceLROnPlateau"), r"metric: expected loss or a metric of the task"),
    ({**scheduled("CosineAnnealingLR", T_max=3), "metric": "loss"}, r"metric: expected none for .*counts updates"),
    ([{**WARM_UP[0], "args": {"start": 1}}, WARM_UP[1]], r"0\.args: .*LinearLR does not take"),
    (scheduled("OneCycleLR", max_lr=1, total_steps=9), r"args: .*cycle_momentum"),
]


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"optimizer": optimizer}, OPTIMIZER + reason) for optimizer, reason in REFUSED_OPTIMIZERS]
    + [
        ({"optimizer": {"name": "adagrad"}, "schedule": given}, SCHEDULE + reason)
        for given, reason in REFUSED_SCHEDULES
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_recipe(TrainingConfig.model_validate(given), model())


def with_table(*, beside: bool = True) -> FlatModel:
    layers = {"words": torch.nn.EmbeddingBag(9, 2, sparse=True)} | ({"scores": torch.nn.Linear(2, 3)} if beside else {})
    module = torch.nn.ModuleDict(layers)
    return FlatModel(module, EmbeddingTables(module))


OWN = {"words": {"optimizer": {"name": "adagrad", "lr": 0.1}}}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"optimizer": named("AdamW")}, r"training\.optimizer\.class: .*optimizer of their own \(training\.tables\)"),
        (
            {"schedule": scheduled("StepLR", step_size=2)},
            r"training\.schedule: expected tables with .*weight' has",
        ),
        ({"clip_value": 1.0}, r"training\.clip_value: expected clip_norm"),
        ({"ema": {"decay": 0.9}, "tables": OWN}, r"training\.ema: expected none for a model with tables"),
    ],
)
def test_what_cannot_be_with_tables_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_recipe(TrainingConfig.model_validate(given), with_table())


def test_tables_with_optimizers_of_their_own_go_with_a_class() -> None:
    """The norm that is clipped is that of all gradients."""
    config = training(named("AdamW"), schedule=WARM_UP, tables=OWN, clip_norm=2.0)
    check_recipe(config, with_table())
    ours = make_optimizer(config, with_table(), norm_of_tables=lambda: 8.0)
    ours.apply([np.full_like(ours.weights, 2.0)], 0.5, 1)  # a norm of 3 and one of 4
    assert ours.clipped_by == pytest.approx(2.0 / 5.0, rel=1e-5)
    with pytest.raises(ConfigError, match=r"training\.optimizer\.class: expected parameters in addition to the tables"):
        check_recipe(config, with_table(beside=False))


def test_a_schedule_of_schedules_is_written_like_one() -> None:
    inner = [{key: part[key] for key in ("class", "args")} for part in WARM_UP]
    nested = scheduled("SequentialLR", schedulers=inner, milestones=[4])
    one, other = (
        make_optimizer(training({"name": "sgd"}, schedule=schedule), model()) for schedule in (nested, WARM_UP)
    )
    for step in range(8):
        one.apply(sums(len(one.weights), step), 1.0, 1)
        other.apply(sums(len(one.weights), step), 1.0, 1)
        assert one.weights.tobytes() == other.weights.tobytes()


def test_the_state_of_another_model_is_refused() -> None:
    config = training(named("AdamW"))
    ours = make_optimizer(config, model())
    ours.apply(sums(len(ours.weights), 0), 1.0, 1)
    tensors = ours.tensors()
    tensors["optimizer.elsewhere.exp_avg"] = tensors["optimizer.0.bias.exp_avg"]
    with pytest.raises(
        CheckpointError, match=r"for the parameters of this model, got another one: KeyError\('elsewhere"
    ):
        make_optimizer(config, model()).load(tensors)


@pytest.mark.parametrize("optimizer", [named("AdamW"), {"name": "adam"}])
@pytest.mark.parametrize("clip", CLIP)
def test_what_is_infinite_is_not_clipped(optimizer: Any, clip: str) -> None:
    ours = make_optimizer(training(optimizer, **{clip: 1.0}), model())
    gradient = np.ones_like(ours.weights)
    gradient[0] = np.inf
    with pytest.raises(DivergedError):
        ours.apply([gradient], 1.0, 1)


def test_a_large_gradient_that_ends_the_state_is_divergence() -> None:
    ours = make_optimizer(training(named("AdamW")), model())
    with pytest.raises(DivergedError, match="state is not finite"):
        ours.apply([np.full_like(ours.weights, 1e30)], 1.0, 1)

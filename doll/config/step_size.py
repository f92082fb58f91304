"""Compute the size of a policy's step, relative to `bsp` at the same learning rate. Pure.

The mean of the gradients of several workers makes one step. Workers that change the model in parallel each make a
step; with `contributions: mean` each of these steps is divided by the number of workers, so that together they move the
model as far as one step on the mean. With `contributions: sum` the model moves as far as all of these steps together.
"""

from __future__ import annotations

import math
from typing import Final

from doll.config.job import JobConfig
from doll.config.training import OptimizerConfig, SgdConfig, TorchConfig

# Names of optimizers whose steps have a size of their own, whatever the size of the gradients is.
_NORMALIZING: Final = ("ada", "nadam", "radam", "rmsprop")
_FRESH_SIGNIFICANCE: Final = 0.1
_NADAM_ARGS: Final = {"lr", "betas", "eps", "weight_decay"}  # of AdamW's arguments, those that NAdam takes


def step_factor(config: JobConfig) -> float:
    """Return how far the model moves at the same `lr`, relative to `bsp`, with all that is computed on the same
    weights. Under `bsp` this is one step, made of the gradients of one batch of each worker. The momentum of an outer
    step counts as a factor of 1 / (1 - momentum).

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, data: {workers: 4}}"
    >>> policies = ("{name: bsp}", "{name: wsp}", "{name: ssp, contributions: sum}", "{name: wsp, contributions: sum}")
    >>> [step_factor(parse(job, [f"training.policy={policy}"])) for policy in policies]
    [1.0, 1.0, 4.0, 4.0]
    """
    policy, workers = config.training.policy, config.data.workers
    is_sum = config.training.reduction == "sum"
    if (outer := policy.outer_step) is not None:
        factor = outer.lr / (1 - outer.momentum)
    elif policy.sparse_push is not None:
        factor = policy.sparse_push.lr
    elif policy.sends_steps:
        factor = workers * policy.parallel_batches * policy.share(workers)
    elif policy.serial_updates or config.group_size > 1:  # a group is one step, and no more begins at a version
        return config.group_size / workers if is_sum else 1.0
    else:
        factor = workers * policy.share(workers) / config.group_size
    return factor / workers if is_sum else factor


def step_samples(config: JobConfig) -> int:
    """Return how many samples together make one step of `training.optimizer.lr`.

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, data: {workers: 4, batch_size: 32}}"
    >>> policies = ("{name: bsp}", "{name: ssp}", "{name: ssp, contributions: sum}", "{name: diloco}")
    >>> [step_samples(parse(job, [f"training.policy={policy}"])) for policy in policies]
    [128, 128, 32, 32]
    """
    policy, workers, size = config.training.policy, config.data.workers, config.data.batch_size
    if policy.averages_workers:
        return workers * policy.batches_per_push * size
    return size if policy.sends_steps else config.group_size * size


def step_text(config: JobConfig) -> str:
    """Describe the step under the job's policy in words, and its size relative to that of `bsp`."""
    policy, workers, size = config.training.policy, config.data.workers, config.data.batch_size
    what = "sum of the gradients" if config.training.reduction == "sum" else "mean gradient"
    each = f"each worker steps on the {what} of each of its batches ({size} samples)"
    parts = workers * policy.parallel_batches
    one = f"so that {parts} batches ({parts * size} samples) together make one step of training.optimizer.lr"
    if (outer := policy.outer_step) is not None:
        text = (
            f"{each}; the server takes {outer.lr:g} of what {policy.batches_per_push} batches have changed on average, "
            f"with momentum {outer.momentum:g}"
        )
    elif (sparse := policy.sparse_push) is not None:
        text = (
            f"{each}; the server takes {sparse.lr:g} of what {policy.batches_per_push} batches have changed on "
            f"average, of which a push sends {sparse.density:.3g}, and later pushes the rest"
        )
    elif policy.sends_steps:
        waves = "" if policy.batches_per_push == 1 else f", in waves of {policy.batches_per_push} batches"
        text = f"{each}, and the server adds the steps of all {workers} workers{waves}"
        text += f", each divided by {parts}, {one}" if policy.averages_workers else ""
    else:
        batches = "one batch" if config.group_size == 1 else f"{config.group_size} batches"
        text = f"an update is one step on the {what} of {batches} ({config.group_size * size} samples)"
        text += f" with a learning rate divided by {workers}, {one}" if policy.averages_workers else ""
    factor = step_factor(config)
    if abs(factor - 1) < 1e-9:
        return f"policy {policy.name}: {text}"
    return (
        f"policy {policy.name}: {text}; at the same training.optimizer.lr the model goes {factor:.3g} times as far as "
        f"under bsp, which makes one step on the {what} of a batch of each worker: divide it by {factor:.3g} for steps "
        "of that size"
    )


def updates_per_round(config: JobConfig) -> float:
    """Return how many updates the policy makes with as many batches as there are workers: `bsp` makes 1."""
    return config.data.workers / config.group_size


def lr_ratio(config: JobConfig) -> float:
    """Return the factor of `training.optimizer.lr` with which an optimizer that normalizes its steps, such as Adam,
    moves the model as far as under `bsp`; 1 for other optimizers.

    `bsp` normalizes the mean of P gradients. If each gradient is normalized on its own and 1/P of the step counts, the
    noise in what Adam divides by is sqrt(P) times as large, so the steps that add up are sqrt(P) times shorter.
    Source: the square root scaling rule (Malladi et al., 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms"), which is for gradients that are mostly noise.

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, data: {workers: 4}, training: {optimizer: {name: adam}}}"
    >>> [lr_ratio(parse(job, [f"training.policy.name={name}"])) for name in ("bsp", "isp", "diloco")]
    [1.0, 2.0, 2.0]
    """
    policy = config.training.policy
    is_mean = policy.averages_workers or policy.outer_step is not None or policy.sparse_push is not None
    return math.sqrt(config.data.workers) if is_mean and _normalizes(config.training.optimizer) else 1.0


def _normalizes(optimizer: OptimizerConfig) -> bool:
    name = optimizer.cls.rpartition(".")[2] if isinstance(optimizer, TorchConfig) else optimizer.name
    return name.lower().startswith(_NORMALIZING)


def advice(config: JobConfig) -> str | None:
    """Return what to set if the policy learns worse than `bsp` from the same samples, or None if there is nothing.

    The rule for `asp` and `vap` is DANA-Slim (Hakimi et al., 2019, "Taming Momentum in a Distributed Asynchronous
    Environment"): each worker has its own momentum, and Nesterov's form of it computes gradients where the steps of the
    other workers will have moved the model (ADR 123). The rule for the learning rate is that of `lr_ratio`. The rule
    for numbers of updates follows from counting updates. That for fresher weights was measured (docs/benchmarks.md).

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, training: {policy: {name: asp}, optimizer: {momentum: 0.9}}}"
    >>> advice(parse(job)).partition(":")[0]
    'set training.policy.contribution=step training.optimizer.nesterov=true'
    >>> advice(parse(job, ["training.policy.contribution=step", "training.optimizer.nesterov=true"]))
    """
    training, ratio = config.training, updates_per_round(config)
    said = []
    if settings := dana_settings(config):
        said.append(
            f"set {' '.join(settings)}: the gradients come from weights before the steps of the others, which "
            "Nesterov's momentum makes up for if each worker has its own"
        )
    if (factor := lr_ratio(config)) != 1:
        said.append(
            f"if training.optimizer's lr was chosen for bsp, multiply it by {factor:.3g}: each batch has a step of its "
            f"own, whose size does not depend on that of the gradient, and bsp takes {config.data.workers} batches "
            f"together, whose mean has {factor:.3g} times less noise"
        )
    if settings := fresher_settings(config):
        said.append(
            f"if the job ends after a few hundred updates, set {' '.join(settings)}: workers then lack less of what "
            "the others have learned, and send more bytes"
        )
    counts = {"training.schedule": training.schedule, "training.ema": training.ema, "stop.updates": config.stop.updates}
    if ratio != 1 and (keys := [key for key, value in counts.items() if value]):
        said.append(
            f"if {', '.join(keys)} were chosen for bsp, multiply the numbers of updates by {ratio:.3g}"
            + (f", and take the root {ratio:.3g} of training.ema.decay" if training.ema else "")
            + f": policy {training.policy.name} makes {ratio:.3g} updates with the batches of one update of bsp"
        )
    return "; ".join(said) or None


def fresher_settings(config: JobConfig) -> tuple[str, ...]:
    """Return the settings with which workers under `isp` and `wsp` get the steps of the others sooner, for optimizers
    that normalize their steps; no settings where they are set, or for other policies and optimizers.

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, training: {policy: {name: isp}, optimizer: {name: adam}}}"
    >>> fresher_settings(parse(job))
    ('training.policy.significance=0.1',)
    """
    policy = config.training.policy
    if lr_ratio(config) == 1 or config.worker.pipeline is not None:
        return ()
    if policy.name == "wsp" and policy.batches_per_push > 1:
        return ("training.policy.wave_batches=1",)
    if policy.name == "isp" and getattr(policy, "significance", 0.0) > _FRESH_SIGNIFICANCE:
        return (f"training.policy.significance={_FRESH_SIGNIFICANCE}",)
    return ()


def dana_settings(config: JobConfig) -> tuple[str, ...]:
    """Return the settings that give each worker under `asp` and `vap` its own optimizer with Nesterov's momentum; no
    settings where they are set, or for other policies and optimizers.

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, training: {policy: {name: asp}, optimizer: {momentum: 0.9}}}"
    >>> dana_settings(parse(job, ["training.policy.contribution=step"]))
    ('training.optimizer.nesterov=true',)
    """
    policy, optimizer = config.training.policy, config.training.optimizer
    values = optimizer.args if isinstance(optimizer, TorchConfig) else vars(optimizer)
    has_state = values.get("momentum") or _normalizes(optimizer)
    if policy.name not in ("asp", "vap") or not policy.averages_workers or not has_state:
        return ()
    settings = [] if policy.sends_steps else ["training.policy.contribution=step"]
    if isinstance(optimizer, SgdConfig) and not optimizer.nesterov:
        settings.append("training.optimizer.nesterov=true")
    elif isinstance(optimizer, TorchConfig) and not (_normalizes(optimizer) or values.get("nesterov")):
        settings.append("training.optimizer.args.nesterov=true")
    elif getattr(optimizer, "cls", "") == "torch.optim.AdamW" and {"lr", "weight_decay"} <= {*values} <= _NADAM_ARGS:
        settings.append("training.optimizer.class=torch.optim.NAdam")
        settings.append("training.optimizer.args.decoupled_weight_decay=true")
    return tuple(settings)

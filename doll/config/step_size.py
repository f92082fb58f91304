"""Compute the size of a policy's step, relative to `bsp` at the same learning rate. Pure.

The mean of the gradients of several workers makes one step. If the workers make steps in parallel and the server adds
them, the model makes as many steps as there are workers.
"""

from __future__ import annotations

from doll.config.job import JobConfig


def step_factor(config: JobConfig) -> float:
    """Return how far the model moves at the same `lr`, relative to `bsp`, with all that is computed on the same
    weights. Under `bsp` this is one step, made of the gradients of one batch of each worker. The momentum of an outer
    step counts as a factor of 1 / (1 - momentum).

    >>> from doll.config import parse
    >>> job = "{job: j, task: {class: 'm:C'}, data: {workers: 4}}"
    >>> [step_factor(parse(job, [f"training.policy.name={name}"])) for name in ("bsp", "ssp", "wsp")]
    [1.0, 4.0, 16.0]
    """
    policy, workers = config.training.policy, config.data.workers
    is_sum = config.training.reduction == "sum"
    if (outer := policy.outer_step) is not None:
        factor = outer.lr / (1 - outer.momentum)
    elif policy.sends_steps:
        factor = float(workers * policy.batches_per_push)
    elif policy.serial_updates or config.group_size > 1:  # a group is one step, and no more begins at a version
        return config.group_size / workers if is_sum else 1.0
    else:
        factor = workers / config.group_size
    return factor / workers if is_sum else factor


def step_text(config: JobConfig) -> str:
    """Describe the step under the job's policy in words, and its size relative to that of `bsp`."""
    policy, workers, size = config.training.policy, config.data.workers, config.data.batch_size
    what = "sum of the gradients" if config.training.reduction == "sum" else "mean gradient"
    each = f"each worker steps on the {what} of each of its batches ({size} samples)"
    if (outer := policy.outer_step) is not None:
        text = (
            f"{each}; the server takes {outer.lr:g} of what {policy.batches_per_push} batches have changed on average, "
            f"with momentum {outer.momentum:g}"
        )
    elif policy.sends_steps:
        waves = "" if policy.batches_per_push == 1 else f", in waves of {policy.batches_per_push} batches"
        text = f"{each}, and the server adds the steps of all {workers} workers{waves}"
    else:
        batches = "one batch" if config.group_size == 1 else f"{config.group_size} batches"
        text = f"an update is one step on the {what} of {batches} ({config.group_size * size} samples)"
    factor = step_factor(config)
    if abs(factor - 1) < 1e-9:
        return f"policy {policy.name}: {text}"
    return (
        f"policy {policy.name}: {text}; at the same training.optimizer.lr the model goes {factor:.3g} times as far as "
        f"under bsp, which makes one step on the {what} of a batch of each worker: divide it by {factor:.3g} for steps "
        "of that size"
    )

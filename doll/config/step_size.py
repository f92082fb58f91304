"""The step that a policy makes, and how far it goes at the same learning rate. Pure.

A mean of gradients makes one step. Steps that workers make side by side, and that are added, make as many.
"""

from __future__ import annotations

from doll.config.job import JobConfig


def step_factor(config: JobConfig) -> float:
    """How many times as far the model goes at the same `lr` as under `bsp`, by what is computed on the same weights:
    there one step is made of the gradients of a batch of each worker. An outer step counts as often as its momentum
    repeats it.

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
    elif policy.serial_updates:
        return config.group_size / workers if is_sum else 1.0
    else:
        factor = workers / config.group_size
    return factor / workers if is_sum else factor


def step_text(config: JobConfig) -> str:
    """The step under the job's policy in words, and how large it is beside that of `bsp`."""
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

"""The factor that limits a job, or that ends its learning, and the remedy, in one line. Pure."""

from __future__ import annotations

from doll.config import JobConfig
from doll.config.step_size import step_factor
from doll.monitor.state.prequential import LossTrend
from doll.records.control import Limit, ServerStatus


def divergence_text(config: JobConfig, trend: LossTrend) -> str:
    """Return how far the loss has risen and the remedy, if the model diverges; otherwise ""."""
    if not (diverged := trend.diverged):
        return ""
    policy, factor = config.training.policy, step_factor(config)
    remedy = "lower training.optimizer.lr"
    if factor > 1.001:
        remedy = f"divide training.optimizer.lr by {factor:.3g}, which is how far policy {policy.name} goes beside bsp"
        if getattr(policy, "contributions", "mean") == "sum":
            remedy += ", set training.policy.contributions: mean"
    clip = ", or set training.clip_norm" if config.training.clip_norm is None else ""
    return f"{diverged}; {remedy}{clip}"


def limit_text(config: JobConfig, status: ServerStatus | None) -> str:
    """Return the limit and the remedy; "" if no limit is known."""
    if status is None or (item := status.limit) is None:
        return ""
    match item.kind:
        case "dry":
            return (
                f"the others wait for worker {item.worker}, whose {_partitions(item)} no records (policy "
                f"{config.training.policy.name} takes a batch of each worker): fewer workers (doll scale), records for "
                "these partitions, or a policy that waits for none without batches (doll, asp, ssp)"
            )
        case "slow":
            batch_s = next((worker.batch_s for worker in status.workers if worker.worker == item.worker), 0.0)
            return (
                f"the others wait for worker {item.worker}, which takes {batch_s:.3g} s for a batch (policy "
                f"{config.training.policy.name}): another machine for it, or a policy that does not wait (doll, asp)"
            )
        case "partition":
            return _partition_text(item)
        case "workers":
            return _workers_text(config, status, item)
        case "updates":
            return (
                f"{item.unread:,} records are unread, and the workers compute {item.share:.0%} of the time: they wait "
                f"for the next weights (policy {config.training.policy.name}): larger batches, more batches in an "
                "update, or a policy that lets workers go on (asp, ssp)"
            )


def _partition_text(item: Limit) -> str:
    others = item.num_partitions - 1
    rest = f"its {others} other partition{'s' * (others > 1)} may move to others (data.rebalance_s); " if others else ""
    return (
        f"partition {item.partitions[0]} has {item.share:.0%} of the {item.unread:,} unread records, and worker "
        f"{item.worker} computes without pause: more workers do not help; {rest}spread its keys over more partitions, "
        "or use a faster machine"
    )


def _workers_text(config: JobConfig, status: ServerStatus, item: Limit) -> str:
    workers = status.num_workers or config.data.workers
    partitions = sum(worker.partitions for worker in status.workers)
    places = min(config.data.places, partitions)
    if workers < places:
        todo = f"more workers (doll scale, up to {places})"
    elif workers < partitions:
        todo = "more workers (resume with a larger data.max_workers)"
    else:
        todo = "each has one partition: more partitions, or faster machines"
    return f"all {workers} workers compute without pause, and {item.unread:,} records are unread: {todo}"


def _partitions(item: Limit) -> str:
    named, more = ", ".join(map(str, item.partitions)), item.num_partitions - len(item.partitions)
    if item.num_partitions == 1:
        return f"partition {named} has"
    return f"partitions {named}{f' and {more} more' if more else ''} have"

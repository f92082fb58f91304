"""What runs beside the workers on AWS, and costs from the first hour on: Kafka, cache, control host. Pure.

The rows of the table in deploy/terraform/README.md, us-east-1; a test holds the two together.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from doll.amounts import duration, usd
from doll.theory.cost import SECONDS_PER_HOUR

StackKind = Literal["self_managed", "msk"]


class StackPart(NamedTuple):
    """A part and its price while the stack is there."""

    name: str
    usd_per_h: float


_BESIDE: Final = (
    StackPart("network: one NAT gateway", 0.05),
    StackPart("keys, secrets, alarms", 0.01),
    StackPart("checkpoints: requests", 0.02),
)
PARTS: Final[dict[StackKind, tuple[StackPart, ...]]] = {
    "self_managed": (
        StackPart("control host, with the cache", 0.20), StackPart("Kafka on three machines", 0.17), *_BESIDE,
    ),
    "msk": (StackPart("control host, with the cache", 0.20), StackPart("Kafka by MSK", 0.65), *_BESIDE),
}  # fmt: skip


def stack_usd_per_h(kind: StackKind) -> float:
    """USD per hour of all parts."""
    return sum(part.usd_per_h for part in PARTS[kind])


def stack_lines(kind: StackKind, seconds: float, workers_usd: float) -> list[str]:
    """A line for each part, and what the job costs with its workers."""
    hours = seconds / SECONDS_PER_HOUR
    width = max(len(part.name) for part in PARTS[kind])
    total = stack_usd_per_h(kind)
    return [
        f"Beside the workers for {duration(seconds)}, on AWS in us-east-1 (kafka_mode {kind}; not in the budget):",
        *(
            f"  {part.name:<{width}}  {part.usd_per_h:.2f} USD/h  {usd(part.usd_per_h * hours):>8} USD"
            for part in PARTS[kind]
        ),
        f"  {'together':<{width}}  {total:.2f} USD/h  {usd(total * hours):>8} USD; with the workers "
        f"{usd(total * hours + workers_usd)} USD",
    ]

"""What of an optimizer and its schedule is no tensor, as bytes in a checkpoint: numbers, texts, and lists of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import CheckpointError, ConfigError


def packed(values: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Equal values make equal bytes.

    Raises:
        ConfigError: they are not plain.
    """
    try:
        return np.frombuffer(msgspec.msgpack.encode(values, order="deterministic"), np.uint8)
    except (TypeError, OverflowError, msgspec.MsgspecError) as exc:
        raise ConfigError(
            "training.optimizer, training.schedule: expected classes whose state is tensors, numbers and texts, which "
            f"a checkpoint can hold, got another type: {exc}"
        ) from exc


def unpacked(data: npt.NDArray[np.uint8] | None) -> dict[str, Any]:
    """What `packed` was given, with lists for tuples; empty for None.

    Raises:
        CheckpointError: it is damaged.
    """
    if data is None:
        return {}
    try:
        return msgspec.msgpack.decode(data.tobytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"expected the plain values of an optimizer, got {exc}") from exc


def like(example: Any, value: Any) -> Any:
    """`value`, as it comes out of a checkpoint, with the type of `example`: a tuple comes as a list."""
    match example, value:
        case dict(), dict():
            items = {key: like(example.get(key), item) for key, item in value.items()}
            return items if type(example) is dict else type(example)(items)
        case ((list() | tuple()), list()):
            examples = [*example, *[None] * len(value)]
            return type(example)(like(one, item) for one, item in zip(examples, value, strict=False))
        case _:
            return value

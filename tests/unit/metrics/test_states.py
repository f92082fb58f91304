"""The form of metric states in records: what is damaged, too long or unknown is refused, and nothing is imported."""

from __future__ import annotations

import math
import random
from typing import Any, Self

import msgspec
import numpy as np
import pytest
from doll import metrics
from doll.errors import RecordError
from doll.metrics.states import MAX_STATE_BYTES, MetricState, combined, from_bytes, merged, to_bytes, values_of


class Largest(MetricState):
    kind = "test:largest"

    def __init__(self, value: float) -> None:
        self.value = value

    def merge(self, *others: Self) -> Self:
        return type(self)(max(self.value, *(other.value for other in others), -math.inf))

    def compute(self) -> float:
        return self.value

    def encode(self) -> float:
        return self.value

    @classmethod
    def decode(cls, content: Any) -> Self:
        return cls(float(content))


def table(**changes: Any) -> bytes:
    parts = {"keys": [1, 5], "pos": [1, 0], "neg": [0, 2], "shift": 0, "most": 9, "squares": [1, 4], "invalid": 0}
    return msgspec.msgpack.encode(("auc", list({**parts, **changes}.values())))


def test_a_state_of_a_users_class_is_sent() -> None:
    assert merged([from_bytes(to_bytes(Largest(value))) for value in (1, 3, 2)]).compute() == 3


def test_a_kind_of_doll_is_not_replaced() -> None:
    with pytest.raises(TypeError, match="no metric of DOLL has, got 'auc'"):
        type("Mine", (Largest,), {"kind": "auc"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x00" * (MAX_STATE_BYTES + 1),
        msgspec.msgpack.encode(("os:system", ["true"])),
        msgspec.msgpack.encode(("mean", [1.0])),
        msgspec.msgpack.encode(("mean", ["1", 2, 3, 4, 5])),
        msgspec.msgpack.encode(("test:largest", "x")),
        msgspec.msgpack.encode(("auc", None)),
        table(keys=[5, 1]),
        table(keys=[1, 1]),
        table(keys=[1, 2**64 - 1]),
        table(keys=[1, 2**62], shift=40),
        table(pos=[1]),
        table(pos=[1, -1]),
        table(neg=[1, math.nan]),
        table(shift=64),
        table(shift=0.0),
        table(most=1),
        table(most=10**9),
        table(squares=[1]),
        table(invalid=-1),
        table(invalid=[1]),
    ],
)
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        from_bytes(data)


def test_damaged_states_are_refused_or_are_states() -> None:
    rng, data = random.Random(4), to_bytes(metrics.auc(np.linspace(0, 1, 50), [0, 1] * 25))
    for _ in range(500):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            state = from_bytes(bytes(bad))
        except RecordError:
            continue
        merged([state, state]).compute()


def test_the_longest_state_of_the_usual_limit_fits() -> None:
    score = np.random.default_rng(1).random(8_000)
    assert len(to_bytes(metrics.auc(score, score < 0.5, np.full(8_000, 0.3)))) < MAX_STATE_BYTES / 2
    with pytest.raises(ValueError, match="at most 65,536 bytes"):
        to_bytes(metrics.auc(score, score < 0.5, max_scores=60_000))


def test_batches_are_combined() -> None:
    first: dict[str, float | bytes] = {"auc": to_bytes(metrics.auc([0.1, 0.9], [0, 1])), "hits": 3.0}
    second: dict[str, float | bytes] = {"auc": to_bytes(metrics.auc([0.5], [1])), "hits": 5.0}
    values, refused = combined([(first, 2.0), (second, 2.0)])
    assert refused == 0
    assert values["hits"] == 2.0
    assert isinstance(values["auc"], bytes)
    assert from_bytes(values["auc"]).compute() == 1.0


def test_states_that_do_not_fit_together_are_left_out() -> None:
    auc, mean = to_bytes(metrics.auc([0.1], [0])), to_bytes(metrics.mean([1.0]))
    first: dict[str, float | bytes] = {"a": auc, "b": auc, "c": b"?", "d": auc}
    second: dict[str, float | bytes] = {"a": mean, "b": 1.0, "c": b"?", "d": auc}
    values, refused = combined([(first, 1.0), (second, 1.0)])
    assert (set(values), refused) == ({"d"}, 3)
    assert combined([({}, 0.0)]) == ({}, 0)
    with pytest.raises(RecordError, match="one metric"):
        merged([metrics.auc([0.1], [0]), metrics.mean([1.0])])


def test_unknown_errors_are_not_shown() -> None:
    assert values_of("auc", metrics.auc([0.1, 0.9], [0, 1])) == {"auc": 1.0}
    assert set(values_of("m", metrics.mean([1.0, 3.0]))) == {"m", "m_stderr"}


def test_segments_are_those_that_are_listed() -> None:
    score, label, device = [0.1, 0.9, 0.5, 0.4], [0, 1, 0, 1], ["phone", "phone", "watch", "tablet"]
    values = metrics.by_segment("auc", metrics.auc, score, label, segment=device, segments=("phone", "tablet", "radio"))
    assert {name: len(state.encode()[0]) for name, state in values.items()} == {
        "auc": 4, "auc[phone]": 2, "auc[tablet]": 1, "auc[other]": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="at most 50, got 51"):
        metrics.by_segment("auc", metrics.auc, score, label, segment=device, segments=range(51))


def test_tensors_are_taken() -> None:
    class Tensor:
        """The part of a tensor that is needed, without torch."""

        def __init__(self, values: list[float]) -> None:
            self.values = values

        def detach(self) -> Tensor:
            return self

        cpu = double = detach

        def is_floating_point(self) -> bool:
            return True

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array(self.values, dtype=dtype)

    assert metrics.accuracy(Tensor([0.2, 0.7]), Tensor([0.0, 0.0])).compute() == 0.5

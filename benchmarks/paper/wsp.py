"""HetPipe's Theorem 1: what virtual workers that are synchronised in waves (WSP) lose by old weights. Pure.

N virtual workers with N_m minibatches in flight and clock distance D use weights that miss at most s_local = N_m - 1 of
their own last updates, and s_global of those of each other one. With s_l = s_local + 1 and s_g = s_global, convex f_t
with gradients of at most L, and ½‖w - w'‖² of at most M² between all weights and the optimum, the steps

    η_t = σ/√t,  σ = M / (L √((2 s_g + s_l) N))

have a mean regret of at most 4 M L √((2 s_g + s_l) N / T) after T minibatches of all virtual workers together.

Source: the HetPipe paper, section 6 and appendix A. The corrections are listed in docs/theory.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from doll.theory import checks
from doll.theory.checks import Floats


def global_staleness(in_flight: int, distance: int) -> int:
    """s_global = (D + 1)(s_local + 1) + s_local - 1: a minibatch p contains all updates 1 to p - (s_global + 1).

    It holds for p > (D + 1)(s_local + 1) + s_local, and is reached (`benchmarks/paper/hetpipe_staleness.py`).

    Args:
        in_flight: N_m, 1 or more.
        distance: D, 0 or more.

    Source: the HetPipe paper, section 5.

    >>> global_staleness(4, 0), global_staleness(4, 4), global_staleness(1, 0)
    (6, 22, 0)
    """
    checks.positive(in_flight=in_flight)
    checks.non_negative(distance=distance)
    return (distance + 1) * in_flight + (in_flight - 1) - 1


@dataclass(frozen=True)
class WspRegret:
    """Theorem 1 for one setting.

    Attributes:
        num_workers: N.
        in_flight: N_m; s_l = N_m.
        distance: D.
        gradient_bound: L, of ‖∇f_t‖.
        radius: M; ½‖w - w'‖² is at most M².

    Raises:
        ValueError: a number out of its range.
    """

    num_workers: int
    in_flight: int
    distance: int
    gradient_bound: float
    radius: float

    def __post_init__(self) -> None:
        checks.positive(num_workers=self.num_workers, gradient_bound=self.gradient_bound, radius=self.radius)
        checks.positive(in_flight=self.in_flight)
        checks.non_negative(distance=self.distance)

    @property
    def window(self) -> int:
        """(2 s_g + s_l) N: at most so many updates are missing in the weights of a minibatch, or there too early."""
        return (2 * global_staleness(self.in_flight, self.distance) + self.in_flight) * self.num_workers

    @property
    def step_scale(self) -> float:
        """σ.

        >>> round(WspRegret(4, 4, 0, gradient_bound=1.0, radius=2.0).step_scale, 4)
        0.25
        """
        return self.radius / (self.gradient_bound * math.sqrt(self.window))

    def step_size(self, update: npt.ArrayLike) -> Floats:
        """η_t = σ/√t, for t = 1, 2, ..."""
        sizes: Floats = self.step_scale / np.sqrt(np.asarray(update, dtype=np.float64))
        return sizes

    def bound(self, updates: npt.ArrayLike) -> Floats:
        """4 M L √((2 s_g + s_l) N / T); a bound from `least_updates` on.

        >>> float(WspRegret(4, 4, 0, gradient_bound=1.0, radius=2.0).bound(6400))
        0.8
        """
        scale = 4 * self.radius * self.gradient_bound
        values: Floats = scale * np.sqrt(self.window / np.asarray(updates, dtype=np.float64))
        return values

    def bound_for_any(self, updates: npt.ArrayLike) -> Floats:
        """The bound before it is simplified, (11) with σ inserted, for every T."""
        count = np.asarray(updates, dtype=np.float64)
        early = self._early / np.sqrt(count)
        scale = self.radius * self.gradient_bound
        values: Floats = scale * np.sqrt(self.window / count) * (1 / self.window + 3 + early)
        return values

    @property
    def least_updates(self) -> int:
        """The least T with 1/((2 s_g + s_l) N) + (s_g + s_l) N / √T <= 1.

        >>> WspRegret(4, 4, 0, gradient_bound=1.0, radius=2.0).least_updates
        1652
        """
        if self.window == 1:
            raise ValueError("one virtual worker with one minibatch in flight: expected N, N_m or D to be larger")
        return math.ceil((self._early / (1 - 1 / self.window)) ** 2 - 1e-9)

    @property
    def _early(self) -> float:
        """(s_g + s_l) N: updates until the windows are full."""
        return (global_staleness(self.in_flight, self.distance) + self.in_flight) * self.num_workers


def regret_of_step(
    optimum: Floats, weights: Floats, gradient: Floats, step_size: float, missing: Floats, extra: Floats
) -> float:
    """⟨w̃_t - w*, g_t⟩ by Lemma 2, from the weights of the reference sequence and what the noisy ones differ by.

    η_t/2 ‖g_t‖² + (D(w*‖w_t) - D(w*‖w_{t+1}))/η_t + ⟨Σ_R η_i g_i - Σ_Q η_i g_i, g_t⟩ with D(w‖w') = ½‖w - w'‖² and
    w_{t+1} = w_t - η_t g_t. The sum over t of the second term is what a bounded D bounds.

    Args:
        optimum: w*, shape (d,), as all vectors.
        weights: w_t of the reference sequence, which has the updates before t.
        gradient: g_t, at the noisy weights w̃_t.
        step_size: η_t.
        missing: Σ η_i g_i of the updates that the noisy weights lack (R_t).
        extra: of those that they have too early (Q_t).

    Source: the HetPipe paper, Lemma 2. Differs from the paper: the difference in the second term has the other sign;
    as printed in (5) and (8), the two sides differ. (9) continues with the right one.

    >>> import numpy as np
    >>> w, g = np.array([1.0, 2.0]), np.array([0.5, -1.0])
    >>> round(regret_of_step(np.zeros(2), w, g, 0.1, missing=np.zeros(2), extra=np.zeros(2)), 9)  # ⟨w_t, g_t⟩
    -1.5
    """
    after = weights - step_size * gradient
    before_sq, after_sq = float(np.sum((optimum - weights) ** 2)), float(np.sum((optimum - after) ** 2))
    staleness = float(missing @ gradient - extra @ gradient)
    return step_size / 2 * float(gradient @ gradient) + (before_sq - after_sq) / (2 * step_size) + staleness

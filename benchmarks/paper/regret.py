"""Regret of SGD on weights that are not the newest: the bounds of the ESSP paper (VAP, SSP) and of MLLess (ISP). Pure.

All have the same beginning. With convex f_t, gradients of at most L, ½‖x_t - x*‖² of at most F² and steps η_t = η/√t,
Lemma A.1 gives for views x̃_t of a sequence x_t

    R = Σ f_t(x̃_t) - f_t(x*)  ≤  √T (η L² + F²/η) + Σ <x̃_t - x_t, g_t>

and each consistency model bounds the last sum by what its views may miss. The papers give the order, O(√T), and few
constants; the constants here follow from their proofs. The corrections are listed in docs/theory.md.

Source: the ESSP paper, Theorems 1, 3 and 5, Lemmas 4 and A.1; the MLLess paper, Theorem 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from doll.theory import checks
from doll.theory.checks import Floats


@dataclass(frozen=True)
class Regret:
    """The assumptions that the bounds share.

    Attributes:
        step_scale: η of η_t = η/√t.
        gradient_bound: L, of ‖∇f_t‖.
        radius: F; ½‖x_t - x*‖² is at most F².

    Raises:
        ValueError: a number that is not positive.
    """

    step_scale: float
    gradient_bound: float
    radius: float

    def __post_init__(self) -> None:
        checks.positive(step_scale=self.step_scale, gradient_bound=self.gradient_bound, radius=self.radius)

    def step_size(self, update: npt.ArrayLike) -> Floats:
        """η_t, for t = 1, 2, ..."""
        sizes: Floats = self.step_scale / np.sqrt(np.asarray(update, dtype=np.float64))
        return sizes

    def of_newest(self, updates: npt.ArrayLike) -> Floats:
        """√T (η L² + F²/η): the bound of R where each gradient is computed on the newest weights.

        >>> float(Regret(1.0, 1.0, 2.0).of_newest(100))
        50.0
        """
        scale = self.step_scale * self.gradient_bound**2 + self.radius**2 / self.step_scale
        bound: Floats = np.sqrt(np.asarray(updates, dtype=np.float64)) * scale
        return bound

    def vap(self, updates: npt.ArrayLike, dimensions: int, value_bound: float) -> Floats:
        """Views off by at most v_t = v_0/√t in each of `dimensions` coordinates: 2 √d L v_0 √T more.

        Source: the ESSP paper, Theorem 1. Differs from the paper: Σ 1/√t ≤ 2√T, where the paper has √T; and without
        its drift of clocks, as the server numbers all updates.

        >>> float(Regret(1.0, 1.0, 2.0).vap(100, dimensions=4, value_bound=0.5))
        70.0
        """
        off = 2 * math.sqrt(dimensions) * self.gradient_bound * value_bound
        bound: Floats = self.of_newest(updates) + off * np.sqrt(np.asarray(updates, dtype=np.float64))
        return bound

    def ssp(self, updates: npt.ArrayLike, num_workers: int, staleness: int) -> Floats:
        """Views that miss, or have too early, all updates of the 2 s + 1 clocks around their own.

        Each update is in the windows of P (2 s + 1) views, and moves each by η_t L at most: 2 η L² P (2 s + 1) √T'
        more, T' being T and the updates of the s + 1 clocks behind it.

        Source: the ESSP paper, Theorem 3, whose proof is that of Ho et al. 2013.

        >>> float(Regret(1.0, 1.0, 2.0).ssp(96, num_workers=2, staleness=1).round(6))
        168.989795
        """
        counts = np.asarray(updates, dtype=np.float64)
        window = num_workers * (2 * staleness + 1)
        late = 2 * self.step_scale * self.gradient_bound**2 * window
        bound: Floats = self.of_newest(counts) + late * np.sqrt(counts + num_workers * (staleness + 1))
        return bound

    def isp(self, updates: npt.ArrayLike, dimensions: int, num_workers: int, threshold: float) -> Floats:
        """Replicas of P workers that hold back what is below v_t = v/√t of a number, t counting the updates of all.

        2 √2 F (P - 1) L n^(3/2) v √T more for what is held back, and 2 η L² (P - 1) √T for the updates of the same
        round, which no other worker has.

        Source: the MLLess paper, Theorem 1, with F for its Δ. Differs from the paper: its (6) has no updates of the
        same round, as if the workers of a round took turns.

        >>> float(Regret(1.0, 1.0, 2.0).isp(100, dimensions=4, num_workers=2, threshold=0.5).round(6))
        296.27417
        """
        held = 2 * math.sqrt(2) * self.radius * (num_workers - 1) * self.gradient_bound * dimensions**1.5 * threshold
        same_round = 2 * self.step_scale * self.gradient_bound**2 * (num_workers - 1)
        bound: Floats = self.of_newest(updates) + (held + same_round) * np.sqrt(np.asarray(updates, dtype=np.float64))
        return bound

    def essp_mean(self, updates: npt.ArrayLike, mean_gamma: float) -> Floats:
        """√T (η L² + F²/η + 2 η L² μ_γ): what T times the left side of Theorem 5 takes away from R.

        Args:
            mean_gamma: μ_γ, mean of γ_t = ‖x̃_t - x_t‖ / ū_t, ū_t being the mean length of the updates of the window.

        >>> float(Regret(1.0, 1.0, 2.0).essp_mean(100, mean_gamma=3.0))
        110.0
        """
        late = 2 * self.step_scale * self.gradient_bound**2 * mean_gamma
        bound: Floats = self.of_newest(updates) + late * np.sqrt(np.asarray(updates, dtype=np.float64))
        return bound

    def essp_tail(
        self, excess: npt.ArrayLike, updates: int, variance_gamma: float, num_workers: int, staleness: int
    ) -> Floats:
        """exp(-T τ² / (2 η̄_T σ_γ + ⅔ η L² (2 s + 1) P τ)): P[R/T exceeds its mean bound by τ or more] is at most that.

        Args:
            excess: τ > 0, per update.
            variance_gamma: σ_γ, the variance of γ_t.

        Source: the ESSP paper, Theorem 5, with η̄_T = η² L⁴ (ln T + 1)/T. Differs from the paper: η̄_T is o(1), not o(T).

        >>> float(Regret(1.0, 1.0, 2.0).essp_tail(0.5, 1000, 0.5, num_workers=2, staleness=1)) < 1e-50
        True
        """
        tau = np.asarray(excess, dtype=np.float64)
        scale = self.step_scale * self.gradient_bound**2
        mean_step = scale**2 * (math.log(updates) + 1) / updates
        most = 2 / 3 * scale * (2 * staleness + 1) * num_workers
        tail: Floats = np.exp(-updates * tau**2 / (2 * mean_step * variance_gamma + most * tau))
        return tail

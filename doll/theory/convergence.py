"""How the error falls with updates and with time, and how many updates an error target takes.

Convex theory: G is L-smooth and c-strongly convex, B bounds the variance of one sample's gradient, and the step is on
the *mean* gradient of the K b samples of a group with 0 < η <= 1/L.

Source: the DOLL paper, Eq. (9)-(13). Corrections: docs/theory.md, D2 and D7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from doll.errors import InfeasiblePlanError
from doll.theory import checks
from doll.theory.checks import Floats


@dataclass(frozen=True)
class Decay:
    """The bound of Eq. (10): error after J updates at most β ρ^J + γ.

    Attributes:
        rho: ρ = 1 - η c, in (0, 1).
        beta: β = G(w_0) - G* - γ; at least 0 for a run that improves.
        gamma: γ, the floor that the gradient noise leaves.
    """

    rho: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise ValueError(f"rho: expected a number in (0, 1), got {self.rho}")
        checks.non_negative(gamma=self.gamma)

    def error(self, updates: npt.ArrayLike) -> Floats:
        """β ρ^J + γ, of the shape of `updates`."""
        return np.asarray(self.beta * np.power(self.rho, np.asarray(updates, dtype=np.float64)) + self.gamma)

    def updates_to(self, target: float) -> int:
        """J(ε) = ⌈ln((ε - γ)/β) / ln ρ⌉: the fewest updates whose bound is at most ε.

        Raises:
            InfeasiblePlanError: ε <= γ, constraint "error"; nearest: the error that the floor allows.

        >>> Decay(rho=0.5, beta=1.0, gamma=0.0).updates_to(0.25)
        2
        """
        checks.positive(target=target)
        if target >= self.beta + self.gamma:
            return 0
        if target <= self.gamma:
            raise InfeasiblePlanError(
                f"the error target binds: {target:g} is at or below the noise floor {self.gamma:g}, which no number of "
                f"updates passes. Feasible: a target above {self.gamma:g}; or lower the floor: it is proportional to "
                f"the step size and to 1/(K b)",
                constraint="error",
                nearest={"target_error": self.gamma, "samples_per_update_factor": self.gamma / target},
            )
        exact = math.log((target - self.gamma) / self.beta) / math.log(self.rho)
        return max(0, math.ceil(exact - 1e-9))

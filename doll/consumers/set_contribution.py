"""Port: what a set of batches adds to an update: the sum of their gradients, or of the worker's own steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from doll.optim.contribution import Contribution
from doll.rows import Rows

if TYPE_CHECKING:
    from doll.consumers.gradient import Gradient


class SetContribution(Protocol):
    """Takes the gradients of a set's batches, in their order. Not thread-safe.

    Attributes:
        holds_back: `values` did not return the whole of what was added; `rest` has it.
    """

    @property
    def holds_back(self) -> bool: ...

    def clear(self) -> None:
        """A grant's first batch is computed next. Where a push takes several grants, what they added so far stays."""

    def add(self, gradient: Gradient, *, batch: int, num_samples: int) -> bool:
        """Take the gradient of batch `batch`, over `num_samples` usable samples.

        Its memory must not change until `keep`.

        Returns:
            False where the set cannot hold it as well: it is the first of another one.
        """
        ...

    def keep(self) -> None:
        """The memory of the gradient that `add` has taken may change from now on."""

    def values(self) -> Contribution | None:
        """What is pushed; None without any gradient. It may be this object's memory, until the next `add`."""
        ...

    def rows(self) -> Mapping[str, Rows]:
        """What is pushed of tables, by name. Called once, behind `values`."""
        ...

    def rest(self, until: int) -> Contribution | None:
        """What was added and is not pushed, of batches below `until` where something is held back; None: nothing."""
        ...

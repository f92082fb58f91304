"""Port: what a set of batches adds to an update: the sum of their gradients, or of the worker's own steps.

The object that adds also says which batches it has added, and for which grants: a push names these and no others
(docs/decisions/0042).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from doll.optim.contribution import Contribution
from doll.tables.rows import Rows

if TYPE_CHECKING:
    from doll.consumers.compute.gradient import Gradient
    from doll.records.control import Grant


class SetContribution(Protocol):
    """Takes the gradients of a set's batches, in their order. Not thread-safe.

    Attributes:
        holds_back: `values` did not return the whole of what was added; `rest` has it.
        holds: (batch, grant id) of what `values` or `rest` returned last, in the order of addition.
    """

    @property
    def holds_back(self) -> bool: ...

    @property
    def holds(self) -> tuple[tuple[int, int], ...]: ...

    def begin(self, grant: Grant) -> bool:
        """The batches of `grant` are computed next. What was added of its first batch or of later ones does not count
        any more, nor what was added for another server. Where a push takes several grants, what is before stays.

        Returns:
            False where its first batch is in the model already: nothing has changed, and nothing may be added.
        """
        ...

    def add(self, gradient: Gradient, *, batch: int, num_samples: int) -> bool:
        """Take the gradient of batch `batch`, over `num_samples` usable samples.

        Its memory must not change until `keep`.

        Returns:
            False where the set cannot hold it as well: it is the first of another one.

        Raises:
            IllegalEventError: a batch must come behind those that were added before.
        """
        ...

    def skip(self, batch: int) -> None:
        """Batch `batch` has no usable sample: it belongs to what is pushed, and adds nothing to it.

        Raises:
            IllegalEventError: as `add`.
        """

    def keep(self) -> None:
        """The memory of the gradient that `add` has taken may change from now on."""

    def values(self) -> Contribution | None:
        """What is pushed; None without any gradient. It may be this object's memory, until the next `add`."""
        ...

    def rows(self) -> Mapping[str, Rows]:
        """What is pushed of tables, by name. Called once, behind `values`."""
        ...

    def rest(self, until: int) -> Contribution | None:
        """What was added and is not pushed, of batches below `until` where something is held back; None: nothing.

        Raises:
            IllegalEventError: what is held back of these cannot be told from what is held back of later ones.
        """
        ...

    def rest_stored(self) -> None:
        """What `rest` returned is stored, and held back no longer. Until then `rest` returns it again."""

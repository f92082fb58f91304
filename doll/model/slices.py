"""The slices of a flat vector that the shards of a parameter server hold (`ps.shards`). Pure.

A slice begins and ends at a multiple of `BLOCK` values. An optimizer sums squares block by block, so the norm of a
gradient has the same bits for any number of shards (docs/decisions/0141).
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK: Final = 1 << 18  # numbers; several blocks of float32 fit into a cache of the second or third level


class Slice(NamedTuple):
    """The values `begin` to `until` - 1 of a flat vector; see `doll.model.flat_model` for its layout.

    Attributes:
        num_parameters: number of its values that are parameters; these come first.
        num_floats: number of its values that are parameters or float buffers.
    """

    begin: int
    until: int
    num_parameters: int
    num_floats: int

    @property
    def size(self) -> int:
        return self.until - self.begin

    def view(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return this part of `vector`, shape (size,), without a copy."""
        return vector[self.begin : self.until]


class Slices(tuple[Slice, ...]):
    """The slices of one vector in their order, one for each shard. They cover the vector."""

    __slots__ = ()

    @property
    def numel(self) -> int:
        """The number of values of the whole vector."""
        return self[-1].until

    def key(self, key: str, shard: int) -> str:
        """Return the key of the blob of one slice. `key`: key of the blob of a whole vector."""
        return key if len(self) == 1 else f"{key}:{shard}of{len(self)}"

    def keys(self, key: str) -> list[str]:
        return [self.key(key, shard) for shard in range(len(self))]


def sliced(
    numel: int, num_parameters: int, num_floats: int, shards: int, *, may_be_empty: bool = False
) -> Slices:  # fmt: skip
    """Divide a flat vector into slices of nearly the same number of blocks. Raises ValueError if there are fewer blocks
    than shards, unless slices may be empty, because shards have rows of tables as well."""
    blocks = max(1, -(-numel // BLOCK))
    if shards > blocks and not may_be_empty:
        raise ValueError(f"expected at most {blocks} shards for {numel} values, got {shards}")
    ends = [min(numel, blocks * number // shards * BLOCK) for number in range(shards + 1)]
    return Slices(
        Slice(begin, until, *(min(max(total - begin, 0), until - begin) for total in (num_parameters, num_floats)))
        for begin, until in itertools.pairwise(ends)
    )

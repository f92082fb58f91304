"""What a stage of a running virtual worker takes, for the partitioner. Pure."""

from __future__ import annotations

from typing import Final

from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig
from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.runtime.virtual_worker import MAX_WAVES_BEHIND

# Arrays of the size of the stage's weights, beside the weights themselves and the copies for minibatches in flight: the
# gradient, one layer's on its way into it, the optimizer's sum, the version that is pulled, the steps of the wave under
# way, those of the waves that the version in use does not hold yet, and what the worker shares with it: half of the
# memory for versions that are pulled, and of that for steps that are pushed.
_COPIES: Final = 6 + MAX_WAVES_BEHIND + 1
# Of the largest input or output of a layer, beside what is kept for the backward pass: the output, gradients on their
# way through a layer (3), and two messages in each direction on both links, of which the neighbours have half (4).
_TEMPORARIES: Final = 8
_SCRATCH_BYTES: Final = 24_000_000  # what BLAS keeps, and small arrays


def live_rule(optimizer: OptimizerConfig, in_flight: int) -> MemoryRule:
    """The rule for N_m minibatches in flight.

    Unlike in the paper, the last stage keeps N_m copies of its weights too: it is N_m - 1 minibatches ahead of what the
    first stage has completed, and makes their steps only when the first stage does. The inputs of as many may wait at
    each stage.
    """
    match optimizer:
        case AdamConfig():
            state = 2
        case AdagradConfig(momentum=momentum):
            state = 2 if momentum else 1
        case SgdConfig(momentum=momentum):
            state = 1 if momentum else 0
        case _:
            state = 2
    return MemoryRule(
        _COPIES + state, stash_last=in_flight, inputs=True, temporaries=_TEMPORARIES, reserved_bytes=_SCRATCH_BYTES
    )

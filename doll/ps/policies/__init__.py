"""Consistency models, one per module; each answers which batches start and which gradients are applied together."""

from __future__ import annotations

from typing import assert_never

from doll.config import AspPolicyConfig, BspPolicyConfig, DollPolicyConfig, PolicyConfig
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import Policy, PolicyView
from doll.ps.policies.bsp import Bsp
from doll.ps.policies.doll import Doll

REGISTRY: dict[str, type[Policy]] = {"doll": Doll, "bsp": Bsp, "asp": Asp}

__all__ = ["REGISTRY", "Asp", "Bsp", "Doll", "Policy", "PolicyView", "make_policy"]


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that the job file names."""
    match config:
        case DollPolicyConfig():
            return Doll(config.group_size)
        case BspPolicyConfig():
            return Bsp()
        case AspPolicyConfig():
            return Asp()
        case _:
            assert_never(config)

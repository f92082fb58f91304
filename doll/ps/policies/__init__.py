"""Consistency models, one per module. Each decides which batches start and which gradients are applied together."""

from __future__ import annotations

from doll.config.policy import POLICIES, PolicyConfig, policy_section
from doll.ps.policies.base import Policy, PolicySpec, PolicyView

__all__ = ["Policy", "PolicySpec", "PolicyView", "make_policy", "policy_spec"]


def policy_spec(name: str) -> PolicySpec:
    """Return the registered policy of this name. Raises KeyError if there is no such policy, and ConfigError if it
    cannot be loaded or is not a policy."""
    policy_section(name)  # checks the object
    spec: PolicySpec = POLICIES.load(name)
    return spec


def make_policy(config: PolicyConfig) -> Policy:
    return policy_spec(config.name).factory(config)

"""What policies predict, and how their sections of the job file are found."""

from __future__ import annotations

import math

import pytest
from doll.config.policy import POLICIES
from doll.errors import ConfigError
from doll.ps.policies import PolicySpec, make_policy, policy_spec
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.doll import DollPolicyConfig
from doll.ps.policies.ssp import SspPolicyConfig
from doll.ps.policies.wsp import WspPolicyConfig


def test_predicted_rate_at_the_papers_setting() -> None:
    """N = 64, arrivals 125/s, b = 256: 1.5625 updates per second with K = 20 (the DOLL paper, section VI)."""
    assert DollPolicyConfig(group_size=20).update_rate_per_s([125.0] * 64, 256) == 1.5625
    assert DollPolicyConfig(group_size=4).update_rate_per_s([125.0] * 64, 256) == pytest.approx(7.8125)


def test_unequal_streams_add_up_but_in_lockstep() -> None:
    assert DollPolicyConfig(group_size=4).update_rate_per_s([10.0, 30.0], 5) == 2.0
    assert DollPolicyConfig(group_size=4, staleness=3).update_rate_per_s([10.0, 30.0], 5) == 2.0
    assert AspPolicyConfig().update_rate_per_s([10.0, 30.0], 5) == 8.0
    assert SspPolicyConfig().update_rate_per_s([10.0, 30.0], 5) == 8.0
    assert WspPolicyConfig(wave_batches=4).update_rate_per_s([10.0, 30.0], 5) == 2.0
    assert BspPolicyConfig().update_rate_per_s([10.0, 30.0], 5) == 2.0


def test_a_source_without_a_pace_has_no_finite_rate() -> None:
    assert DollPolicyConfig(group_size=4).update_rate_per_s([math.inf] * 2, 5) == math.inf


def test_batches_per_update() -> None:
    assert [config.batches_per_update(5) for config in (DollPolicyConfig(), BspPolicyConfig(), AspPolicyConfig())] == [
        4, 5, 1
    ]  # fmt: skip


@pytest.mark.parametrize("name", POLICIES.names())
def test_a_spec_its_section_and_its_policy_have_one_name(name: str) -> None:
    spec = policy_spec(name)
    assert isinstance(spec, PolicySpec)
    section = spec.config(name=name)
    policy = make_policy(section)
    assert (spec.name, section.name, policy.name) == (name, name, name)
    assert spec.config.__doc__, "docs/configuration.md shows it"


def test_an_unknown_name_is_a_key_error_for_code() -> None:
    """The job file's check turns it into a ConfigError that names the known ones (tests/unit/test_config.py)."""
    with pytest.raises(KeyError):
        policy_spec("theirs")
    assert not issubclass(KeyError, ConfigError)


def test_proposition_1_is_claimed_only_where_one_update_follows_the_other() -> None:
    sections = (DollPolicyConfig(), DollPolicyConfig(staleness=1), BspPolicyConfig(), AspPolicyConfig())
    assert [config.serial_updates for config in sections] == [True, False, True, False]

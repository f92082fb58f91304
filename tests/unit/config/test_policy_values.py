"""Parameters of policies that make no sense: each is refused by its key, whichever policy it is."""

from __future__ import annotations

import math

import pytest
from doll.config import parse
from doll.config.policy import POLICIES, PolicyConfig, policy_section
from doll.errors import ConfigError

NUMBERS = [
    (name, key)
    for name in POLICIES.built_in
    for key, field in policy_section(name).model_fields.items()
    if field.annotation in (int, float)
]
NEVER = ("true", "yes", "null", ".nan", "-.inf", "-1", "-99999999999999999999999999", '"a"', '""', "[1]", "{a: 1}")
TOO_LARGE = (".inf", "1e400", "1e308", "99999999999999999999999999")


def section(name: str, **values: str) -> PolicyConfig:
    text = "".join(f", {key}: {value}" for key, value in values.items())
    return parse(f"job: j\ntask: {{class: 'm:C'}}\ntraining: {{policy: {{name: {name}{text}}}}}").training.policy


def test_every_policy_with_a_number_is_here() -> None:
    assert {name for name, _ in NUMBERS} == {"doll", "ssp", "essp", "vap", "isp", "wsp", "diloco"}


@pytest.mark.parametrize("value", NEVER)
@pytest.mark.parametrize(("name", "key"), NUMBERS)
def test_what_is_no_number_of_the_range_is_refused_by_its_key(name: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.policy\.{key}: "):
        section(name, **{key: value})


@pytest.mark.parametrize("value", TOO_LARGE)
@pytest.mark.parametrize(("name", "key"), NUMBERS)
def test_what_is_too_large_is_refused_too(name: str, key: str, value: str) -> None:
    """A bound on values may be any finite number; infinity is refused."""
    if key == "value_bound":
        assert getattr(section(name, value_bound=value), key) >= 1e26
        return
    with pytest.raises(ConfigError, match=r"training\.policy"):
        section(name, **{key: value})


@pytest.mark.parametrize("name", POLICIES.built_in)
def test_an_unknown_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.policy\.nonsense: unknown key"):
        section(name, nonsense="1")


@pytest.mark.parametrize("value", ["steps", "true", "1", "[step]"])
@pytest.mark.parametrize("name", ["bsp", "asp"])
def test_a_contribution_that_there_is_not_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.policy\.contribution: .*'gradient' or 'step'"):
        section(name, contribution=value)


@pytest.mark.parametrize("name", ["doll", "ssp", "essp", "vap", "isp", "wsp", "diloco"])
def test_a_contribution_where_there_is_no_choice_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.policy\.contribution: unknown key"):
        section(name, contribution="gradient")


def test_no_bound_is_infinity() -> None:
    assert math.isinf(section("vap", value_bound=".inf").value_bound)  # type: ignore[attr-defined]

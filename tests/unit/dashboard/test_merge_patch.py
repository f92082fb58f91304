"""A merge patch turns what a browser has into what it should have, and says no more than that."""

from typing import Any

from doll.dashboard.merge_patch import merge_patch
from hypothesis import given
from hypothesis import strategies as st

VALUES: Any = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=1), inner, max_size=3),
    max_leaves=12,
)
STATES = st.dictionaries(st.text("xyz", min_size=1, max_size=1), VALUES, max_size=3)


def apply(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386, as the front end does it."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict):
            inner = target.get(name)
            target[name] = apply(inner if isinstance(inner, dict) else {}, value)
        else:
            target[name] = value
    return target


def copied(value: Any) -> Any:
    return {name: copied(inner) for name, inner in value.items()} if isinstance(value, dict) else value


@given(STATES, STATES)
def test_the_patch_of_two_states_makes_one_of_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(copied(before), merge_patch(before, after)) == after


@given(STATES)
def test_nothing_is_sent_where_nothing_changed(state: dict[str, Any]) -> None:
    assert merge_patch(state, copied(state)) == {}


def test_only_what_differs_is_sent() -> None:
    before = {"workers": {"0": {"lag": 1, "state": "live"}, "1": {"lag": 5}}, "gone": [1]}
    after = {"workers": {"0": {"lag": 2, "state": "live"}, "1": {"lag": 5}}}
    assert merge_patch(before, after) == {"workers": {"0": {"lag": 2}}, "gone": None}

"""Names with separators, nested dicts, and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlpack_loader import flatten, unflatten
from dlpack_loader.errors import OptionError

KEYS = st.text("ab0", max_size=2)
TREES: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(KEYS, st.integers() | st.lists(st.integers()), min_size=1),
    lambda inner: st.dictionaries(KEYS, st.integers() | inner, min_size=1),
)


def test_levels() -> None:
    value = object()
    tree = unflatten({"a.b.c": value, "a.d": 2, "e": 3})
    assert tree == {"a": {"b": {"c": value}, "d": 2}, "e": 3}
    assert tree["a"]["b"]["c"] is value
    assert flatten(tree) == {"a.b.c": value, "a.d": 2, "e": 3}


def test_nothing_is_nothing() -> None:
    assert unflatten({}) == flatten({}) == {}


def test_the_order_of_the_names_is_kept() -> None:
    names = ["z.b", "z.a", "a", "z.c.b", "b.x"]
    assert list(flatten(unflatten(dict.fromkeys(names)))) == ["z.b", "z.a", "z.c.b", "a", "b.x"]


def test_another_separator() -> None:
    assert unflatten({"a/b.c": 1, "a/d": 2}, "/") == {"a": {"b.c": 1, "d": 2}}
    assert unflatten({"a::b": 1}, separator="::") == {"a": {"b": 1}}
    assert flatten({"a": {"b.c": 1}}, separator="/") == {"a/b.c": 1}


def test_empty_parts_of_a_name_are_keys() -> None:
    names = {"": 1, "a..b": 2, ".c": 3} | {"d.": 4}
    with pytest.raises(OptionError, match=r"'' is a value, and '\.c' needs it to be a mapping"):
        unflatten(names)
    del names[""]
    assert unflatten(names) == {"a": {"": {"b": 2}}, "": {"c": 3}, "d": {"": 4}}
    assert flatten(unflatten(names)) == names


@pytest.mark.parametrize("names", [["a", "a.b"], ["a.b", "a"], ["x.a.b.c", "y", "x.a"], ["x.a", "x.a.b.c"]])
def test_a_value_that_is_a_level_too(names: list[str]) -> None:
    short = min((name for name in names if name != "y"), key=len)
    with pytest.raises(OptionError, match=f"'{short}' is a value, and '.*' needs it to be a mapping") as caught:
        unflatten(dict.fromkeys(names))
    assert caught.value.tensor == short
    assert isinstance(caught.value, ValueError)


def test_a_name_that_only_begins_alike_is_no_conflict() -> None:
    assert unflatten({"a": 1, "ab": 2, "ab.c"[:2] + "c": 3}) == {"a": 1, "ab": 2, "abc": 3}


def test_a_dict_as_a_value_is_not_merged_into() -> None:
    """It is the caller's, and would be written to."""
    value = {"x": 1}
    with pytest.raises(OptionError, match="'a' is a value"):
        unflatten({"a": value, "a.b": 2})
    with pytest.raises(OptionError, match="'a' is a value"):
        unflatten({"a.b": 2, "a": value})
    assert value == {"x": 1}


@pytest.mark.parametrize("separator", ["", None, 3])
def test_what_is_no_separator(separator: Any) -> None:
    for call in (unflatten, flatten):
        with pytest.raises(OptionError, match="separator is a string that is not empty"):
            call({"a": 1}, separator)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": {"b.c": 1}}, "the key 'b.c' under 'a' is no string without '.'"),
        ({"a": {3: 1}}, "the key 3 under 'a'"),
        ({None: 1}, "the key None under ''"),
        ({"a": {"b": {}}}, "the mapping 'a.b' is empty"),
    ],
)
def test_what_no_names_can_tell(tree: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        flatten(tree)


def test_names_that_are_no_strings() -> None:
    names: Any = {3: 1}
    with pytest.raises(OptionError, match="names are strings, not 3"):
        unflatten(names)


def test_only_mappings_are_levels() -> None:
    tree = {"a": [1, {"b": 2}], "c": (3,)}
    assert flatten(tree) == tree


def test_more_levels_than_python_has_frames() -> None:
    name = ".".join("a" * 20_000)
    tree = unflatten({name: 1})
    assert flatten(tree) == {name: 1}
    while isinstance(tree, dict):  # a dict that deep is freed level by level, or Python's stack ends first
        tree = tree["a"]


@given(TREES)
def test_there_and_back(tree: dict[str, Any]) -> None:
    assert unflatten(flatten(tree)) == tree


@given(st.dictionaries(st.text("ab.", max_size=6), st.integers()))
def test_back_and_there(names: dict[str, int]) -> None:
    try:
        tree = unflatten(names)
    except OptionError:
        assert any(longer.startswith(name + ".") for name in names for longer in names)
        return
    assert flatten(tree) == names

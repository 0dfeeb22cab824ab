"""Names with dots in them and nested dicts, which JAX calls pytrees: one into the other. Pure, no framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlpack_loader.errors import OptionError

__all__ = ["flatten", "unflatten"]


def unflatten(tensors: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Turn names into nested dicts: ``{"a.b": x}`` becomes ``{"a": {"b": x}}``.

    The values are not touched. ``flatten`` undoes it.

    Parameters
    ----------
    tensors
        Anything by name, such as what ``load_file`` returns.
    separator
        What stands between two levels of a name.

    Raises
    ------
    OptionError
        A name is both a value and a level of another name; no separator; a name that is no string.

    Examples
    --------
    >>> unflatten({"embed": 1, "layers.0.q": 2, "layers.0.k": 3})
    {'embed': 1, 'layers': {'0': {'q': 2, 'k': 3}}}
    """
    _check_separator(separator)
    root: dict[str, Any] = {}
    levels: dict[str, dict[str, Any]] = {}  # those that were made here: a value may be a dict too
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise OptionError(f"names are strings, not {name!r}")
        *path, last = name.split(separator)
        at, known = root, ""
        for key in path:
            known += key + separator
            if known not in levels:
                if key in at:
                    raise _conflict(known.removesuffix(separator), name)
                levels[known] = at[key] = {}
            at = levels[known]
        if last in at:
            longer = next(other for other in tensors if other.startswith(name + separator))
            raise _conflict(name, longer)
        at[last] = value
    return root


def flatten(tree: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Turn nested dicts into names: ``{"a": {"b": x}}`` becomes ``{"a.b": x}``.

    Only mappings are levels; lists, tuples and everything else are values. ``unflatten`` undoes it.

    Parameters
    ----------
    tree
        Mappings in mappings, to any depth, with strings as keys.
    separator
        What is put between two levels.

    Raises
    ------
    OptionError
        What no names can tell: a key that holds the separator or is no string, or an empty mapping inside the tree.

    Examples
    --------
    >>> flatten({"embed": 1, "layers": {"0": {"q": 2, "k": 3}}})
    {'embed': 1, 'layers.0.q': 2, 'layers.0.k': 3}
    """
    _check_separator(separator)
    names: dict[str, Any] = {}
    # A stack of its own: names may have more levels than Python has frames.
    stack: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter(tree.items()))]
    while stack:
        prefix, items = stack[-1]
        for key, value in items:
            if not isinstance(key, str) or separator in key:
                raise OptionError(
                    f"the key {key!r} under {prefix.removesuffix(separator)!r} is no string without {separator!r}",
                    hint="Rename it, or pass another separator",
                )
            if not isinstance(value, Mapping):
                names[prefix + key] = value
                continue
            if not value:
                raise OptionError(
                    f"the mapping {prefix + key!r} is empty, and no name would tell of it",
                    hint="Take it out of the tree",
                )
            stack.append((prefix + key + separator, iter(value.items())))
            break
        else:
            stack.pop()
    return names


def _check_separator(separator: object) -> None:
    if not isinstance(separator, str) or not separator:
        raise OptionError(f"separator is a string that is not empty, not {separator!r}")


def _conflict(short: str, long: str) -> OptionError:
    return OptionError(
        f"{short!r} is a value, and {long!r} needs it to be a mapping",
        tensor=short,
        hint="Rename one of the two, or pass a separator that neither name holds",
    )

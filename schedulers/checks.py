"""What constructors refuse at once: an argument of a wrong type, or a number out of range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TypeVar

__all__ = ["as_dict", "check_number", "check_seconds", "check_whole"]

_T = TypeVar("_T")


def check_whole(name: str, value: object, *, least: int | None = None, none: str | None = None) -> None:
    """Refuse what is no whole number, or below the least.

    Args:
        name: The argument's.
        value: What was given. NumPy's integers are whole numbers, True and False are not.
        least: The least that it may be.
        none: What None stands for, where it is allowed.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below ``least``.
    """
    if value is None and none is not None:
        return
    or_none = f" (or None for {none})" if none else ""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number{or_none}, not {value!r:.100}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}{or_none}, not {value}")


def check_number(name: str, value: object) -> None:
    """Refuse what is no number. Infinity is one.

    Raises:
        TypeError: It is none.
        ValueError: It is NaN.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r:.100}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, not {value}")


def check_seconds(name: str, value: object, *, or_zero: bool = False, none: str | None = None) -> None:
    """Refuse what is no time to wait.

    Args:
        name: The argument's.
        value: What was given.
        or_zero: Whether it may be 0.
        none: What None stands for, where it is allowed.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of range.
    """
    if value is None and none is not None:
        return
    check_number(name, value)
    assert isinstance(value, Real)  # noqa: S101 - for mypy, which cannot know
    if value < 0 or (value == 0 and not or_zero):
        or_none = f" (or None for {none})" if none else ""
        raise ValueError(f"{name} must be {'0 or more' if or_zero else 'above 0'} seconds{or_none}, not {value}")


def as_dict(name: str, value: Mapping[str, _T] | None) -> dict[str, _T]:
    """A copy of an argument that is a mapping; empty for None.

    Raises:
        TypeError: It is no mapping. What it is instead is not shown: it may hold a token.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, not a {type(value).__name__}")
    return dict(value)

"""Settings that make no sense are refused where they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from .errors import ConfigurationError

__all__ = ["mapping", "positive", "whole"]


_K = TypeVar("_K")
_V = TypeVar("_V")


def mapping(name: str, value: Mapping[_K, _V] | None) -> Mapping[_K, _V]:
    """The value; an empty mapping for None.

    Raises:
        ConfigurationError: It is no mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        # Not the value: it may be an address with a password, or a header with a token.
        address = " An address goes as base_url=…" if isinstance(value, str) and name == "env_config" else ""
        raise ConfigurationError(f"{name} is a {type(value).__name__}", remedy=f"Give a dict.{address}")
    return value


def positive(name: str, value: float, *, or_zero: bool = False) -> float:
    """The value.

    Raises:
        ConfigurationError: It is no finite number above 0 (or 0, with ``or_zero``).
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise ConfigurationError(
            f"{name} is {value!r}", remedy=f"Give a finite number {'of 0 or more' if or_zero else 'above 0'}."
        )
    return value


def whole(name: str, value: int, *, least: int) -> int:
    """The value.

    Raises:
        ConfigurationError: It is no whole number, or below ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} is {value!r}", remedy=f"Give a whole number of {least} or more.")
    return value

"""For errors that name something unknown: what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest known names, at most three; empty when none is near."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""

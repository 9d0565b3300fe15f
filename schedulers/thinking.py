"""What a completion says outside of its thinking."""

from __future__ import annotations

import re

__all__ = ["visible_text"]

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def visible_text(text: str) -> str:
    """A completion without its thinking, also where only one of the two tags is there."""
    # What follows the last end is set aside first: searched for ends, each of many beginnings there would cost a scan.
    before, end, after = text.rpartition("</think>")
    before = _THOUGHT.sub("", before + end).rpartition("</think>")[2]
    return (before + after).partition("<think>")[0]

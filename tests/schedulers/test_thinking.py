"""Moves and answers are read outside of thinking."""

from __future__ import annotations

import pytest

from schedulers.thinking import visible_text


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("a", "a"),
        ("<think>x</think>a", "a"),
        ("<think>x</think>a<think>y</think>b", "ab"),
        ("x</think>a", "a"),
        ("a<think>x", "a"),
        ("<think>\nx\n</think>\n\na", "\n\na"),
        ("<think>x", ""),
        ("<think></think>", ""),
        ("<think>" * 200_000, ""),
        ("a" + "</think>" * 200_000 + "b" + "<think>" * 200_000, "b"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_thinking_is_not_visible(text: str, visible: str) -> None:
    """P06: with both tags, one of them, nothing between them, or so many that anything but one scan takes hours."""
    assert visible_text(text) == visible

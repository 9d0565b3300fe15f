"""Lines for the screen, as they are: nothing in them is markup, not even ``:bug:``."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

__all__ = ["say", "warn"]


def say(text: str, *, error: bool = False) -> None:
    """Print a line, to stderr if it is about something that went wrong."""
    Console(stderr=error).print(Text(text), soft_wrap=True)


def warn(kind: str, text: str, *, style: str) -> None:
    """Print a line to stderr that begins with what kind of line it is, in colour."""
    Console(stderr=True).print(Text.assemble((f"{kind}:", style), " ", text), soft_wrap=True)

"""From a completion to a Sudoku move: the last bracketed triple outside thinking. Pure: no I/O."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from examples.sudoku.board import Move
from schedulers.thinking import visible_text

__all__ = ["ParsedMove", "parse_move"]

# Digits of any script; one line; blanks or commas between the numbers. Nothing is guessed: "[537]" is no move.
_GAP = r"(?:[^\S\r\n]*,[^\S\r\n]*|[^\S\r\n]+)"
_TRIPLE = re.compile(rf"\[[^\S\r\n]*(\d+){_GAP}(\d+){_GAP}(\d+)[^\S\r\n]*\]")


@dataclass(frozen=True)
class ParsedMove:
    """What was found in a completion.

    Args:
        status: ``move``; ``out_of_range`` (a triple, but no cell or digit of the board); ``none``; or ``truncated``
            (the completion was cut before its move).
        move: The triple, for the first two.
    """

    status: Literal["move", "out_of_range", "none", "truncated"]
    move: Move | None = None


def parse_move(text: str, finish_reason: str = "stop") -> ParsedMove:
    """Find the move in a completion.

    Args:
        text: The completion.
        finish_reason: ``"length"`` when the engine cut it.
    """
    text = visible_text(text)
    triples = _TRIPLE.findall(text)
    cut = finish_reason == "length"
    if not triples or (cut and "[" in text.rpartition("]")[2]):  # it was about to say another one
        return ParsedMove("truncated" if cut else "none")
    move = Move(*(_number(digits) for digits in triples[-1]))
    return ParsedMove("move" if move.in_range else "out_of_range", move)


def _number(digits: str) -> int:
    """The value of digits of any script; more than three digits are out of range whatever they are."""
    value = "".join(str(unicodedata.digit(digit)) for digit in digits[-4:])
    return int(value) if len(digits) <= 3 else 1000

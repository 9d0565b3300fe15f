"""Mastermind as immutable values: codes, pegs, and which codes agree with all that is known. Pure: no I/O."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

__all__ = ["Board", "Code", "Guess", "Pegs", "count_pegs", "parse_board", "render_code"]

Code: TypeAlias = tuple[int, ...]

_RULES = re.compile(r"^The code has (\d+) digits from 1 to (\d+), (no digit twice|a digit may repeat)\.$", re.MULTILINE)
_GUESS = re.compile(r"^\[([\d ]+)\] black (\d+), white (\d+)$", re.MULTILINE)


class Pegs(NamedTuple):
    """The answer to a guess: how many digits stand in their right place, and how many others in a wrong one."""

    black: int
    white: int


class Guess(NamedTuple):
    """A guess and its pegs."""

    code: Code
    pegs: Pegs

    def __str__(self) -> str:
        return f"{render_code(self.code)} black {self.pegs.black}, white {self.pegs.white}"


@dataclass(frozen=True)
class Board:
    """What a player sees: the rules of the code and the guesses so far.

    Args:
        length: Digits of a code.
        highest: Digits go from 1 to this one.
        repeats: A digit may stand more than once.
        guesses: In the order of play.
    """

    length: int
    highest: int
    repeats: bool
    guesses: tuple[Guess, ...] = ()

    def allows(self, code: Code) -> bool:
        """Whether there is such a code."""
        in_range = all(1 <= digit <= self.highest for digit in code)
        return len(code) == self.length and in_range and (self.repeats or len(set(code)) == len(code))

    def agrees(self, code: Code) -> bool:
        """Whether the code may be the secret after these guesses."""
        return self.allows(code) and all(count_pegs(code, guess.code) == guess.pegs for guess in self.guesses)

    def candidates(self) -> Iterator[Code]:
        """All codes that may be the secret, in order."""
        codes = itertools.product(range(1, self.highest + 1), repeat=self.length)
        return filter(self.agrees, codes)

    def __str__(self) -> str:
        repeats = "a digit may repeat" if self.repeats else "no digit twice"
        rules = f"The code has {self.length} digits from 1 to {self.highest}, {repeats}."
        return "\n".join([rules, *map(str, self.guesses)])


def parse_board(text: str) -> Board | None:
    """Read a board as ``str`` shows it, among anything else; None when there is none."""
    rules = _RULES.search(text)
    if rules is None:
        return None
    guesses = (
        Guess(tuple(map(int, digits.split())), Pegs(int(black), int(white)))
        for digits, black, white in _GUESS.findall(text)
    )
    return Board(int(rules[1]), int(rules[2]), rules[3] == "a digit may repeat", tuple(guesses))


def count_pegs(secret: Code, guess: Code) -> Pegs:
    """The pegs of a guess; the same with the two exchanged."""
    black = sum(a == b for a, b in zip(secret, guess, strict=True))
    return Pegs(black, (Counter(secret) & Counter(guess)).total() - black)


def render_code(code: Code) -> str:
    """The form in which players write codes, such as ``[2 1 4 5]``."""
    return f"[{' '.join(map(str, code))}]"

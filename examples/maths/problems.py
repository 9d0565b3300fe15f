"""Small problems with one right answer, made from a seed and solved from their text. Pure: no I/O."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Problem", "random_problem", "solve"]

_EQUATION = re.compile(r"Solve for x: (-?\d+)x ([+-]) (\d+) = (-?\d+)")
_SUM = re.compile(r"What is (.+)\?")
_SHARE = re.compile(r"What is (\d+)% of (\d+)\?")


@dataclass(frozen=True)
class Problem:
    """A question and its answer.

    Args:
        question: What the model reads.
        answer: The value, as LaTeX.
    """

    question: str
    answer: str


def random_problem(rng: random.Random) -> Problem:
    """Draw a problem: a sum of fractions, a mixed calculation, a percentage or a linear equation."""
    kind = rng.choice(("equation", "share", "fractions", "calculation"))
    if kind == "equation":
        a, x, b = rng.randint(2, 12), rng.randint(-12, 12), rng.randint(1, 40)
        question = f"Solve for x: {a}x + {b} = {a * x + b}"
    elif kind == "share":
        question = f"What is {rng.randrange(5, 100, 5)}% of {rng.randint(2, 60) * 4}?"
    elif kind == "fractions":
        terms = (f"{rng.randint(1, 9)}/{rng.randint(2, 9)}" for _ in range(2))
        question = f"What is {rng.choice((' + ', ' - ')).join(terms)}?"
    else:
        question = f"What is {rng.randint(2, 60)} {rng.choice('+-')} {rng.randint(2, 20)} * {rng.randint(2, 20)}?"
    return Problem(question, _latex(solve(question)))


def solve(question: str) -> Fraction:
    """The answer to a question of the kinds that ``random_problem`` draws.

    Raises:
        ValueError: It is of no such kind.
    """
    if found := _EQUATION.search(question):
        a, sign, b, right = found.groups()
        return Fraction(int(right) - int(sign + b), int(a))
    if found := _SHARE.search(question):
        return Fraction(int(found[1]) * int(found[2]), 100)
    if found := _SUM.search(question):
        return _calculate(found[1].split())
    raise ValueError(f"cannot solve {question!r}")


def _calculate(words: list[str]) -> Fraction:
    """A sum of products, left to right: ``["3", "-", "4", "*", "1/2"]``."""
    total, term, sign = Fraction(0), Fraction(words[0]), 1
    for operator, number in zip(words[1::2], words[2::2], strict=True):
        if operator == "*":
            term *= Fraction(number)
        else:
            total += sign * term
            term, sign = Fraction(number), 1 if operator == "+" else -1
    return total + sign * term


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' * (value < 0)}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"

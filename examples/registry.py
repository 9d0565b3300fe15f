"""All games of this folder by name."""

from __future__ import annotations

from examples.example import Example
from examples.frozen_lake.example import EXAMPLE as FROZEN_LAKE
from examples.guess_the_number.example import EXAMPLE as GUESS_THE_NUMBER
from examples.mastermind.example import EXAMPLE as MASTERMIND
from examples.maths.example import EXAMPLE as MATHS
from examples.sudoku.example import EXAMPLE as SUDOKU

__all__ = ["EXAMPLES"]

EXAMPLES: dict[str, Example] = {
    example.name: example for example in (SUDOKU, FROZEN_LAKE, GUESS_THE_NUMBER, MASTERMIND, MATHS)
}

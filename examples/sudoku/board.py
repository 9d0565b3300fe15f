"""A Sudoku board as an immutable value: read it, render it, ask it for candidates, solve it.

Rows, columns and numbers count from 1, as in the moves that players write: ``[row column number]``. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Board", "Cell", "Move", "parse_board", "random_puzzle", "solve"]

_HEADER = "   C1 C2 C3   C4 C5 C6   C7 C8 C9  "
_RULER = "   " + "- " * 16

# Nine rows of nine cells in order; between two rows nothing but white space and a ruler.
_ROWS = [rf"R{row}((?:[ \t|]+[.1-9]){{9}})" for row in range(1, 10)]
_BOARD = re.compile(r"\b" + r"\s*\n[\s-]*".join(_ROWS) + r"(?![ \t|]*[.\d])")


class Cell(NamedTuple):
    """A place on the board; both count from 1."""

    row: int
    col: int


class Move(NamedTuple):
    """A number for a cell, as the player wrote it: nothing says that it is in range or right."""

    row: int
    col: int
    number: int

    @property
    def cell(self) -> Cell:
        """Where the number goes."""
        return Cell(self.row, self.col)

    @property
    def in_range(self) -> bool:
        """Whether row, column and number all lie in 1..9."""
        return all(1 <= value <= 9 for value in self)

    def __str__(self) -> str:
        """The canonical form that the environment reads, such as ``[5 3 7]``."""
        return f"[{self.row} {self.col} {self.number}]"


@dataclass(frozen=True)
class Board:
    """Nine rows of nine numbers, 0 where a cell is empty. Make one with ``from_rows`` or ``parse_board``.

    Args:
        rows: Shape ``(9, 9)``, values 0..9.
    """

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Board:
        """Make a board of any 9 by 9 sequence of whole numbers.

        Whether the numbers obey the rules is not checked: a board is what somebody showed us.

        Raises:
            ValueError: The shape is not 9 by 9, or a value is no whole number in 0..9.
        """
        if len(rows) != 9 or any(len(row) != 9 for row in rows):
            raise ValueError(f"a board needs 9 rows of 9 numbers, not rows of {[len(row) for row in rows]}")
        for r, row in enumerate(rows, 1):
            for c, value in enumerate(row, 1):
                if type(value) is not int or not 0 <= value <= 9:
                    raise ValueError(f"row {r}, column {c} of the board must be 1..9, or 0 for empty, not {value!r}")
        return cls(tuple(tuple(row) for row in rows))

    def number(self, cell: Cell) -> int:
        """What stands in the cell; 0 when it is empty.

        Raises:
            ValueError: The cell is not on the board.
        """
        if not (1 <= cell.row <= 9 and 1 <= cell.col <= 9):
            raise ValueError(f"row and column must lie in 1..9, not {tuple(cell)}")
        return self.rows[cell.row - 1][cell.col - 1]

    @property
    def filled(self) -> int:
        """How many of the 81 cells hold a number."""
        return sum(1 for row in self.rows for value in row if value)

    @property
    def empty_cells(self) -> tuple[Cell, ...]:
        """The empty cells in reading order."""
        return tuple(Cell(r, c) for r, row in enumerate(self.rows, 1) for c, value in enumerate(row, 1) if not value)

    def candidates(self, cell: Cell) -> tuple[int, ...]:
        """The numbers that the cell's row, column and box still allow, in order; none for a filled cell."""
        if self.number(cell):
            return ()
        r, c = cell.row - 1, cell.col - 1
        box = (self.rows[i][j] for i in _triple(r) for j in _triple(c))
        seen = {*self.rows[r], *(row[c] for row in self.rows), *box}
        return tuple(n for n in range(1, 10) if n not in seen)

    @property
    def is_solved(self) -> bool:
        """Whether every row, column and box holds each of 1..9 once."""
        columns = zip(*self.rows, strict=True)
        boxes = ([self.rows[i][j] for i in _triple(r) for j in _triple(c)] for r in (0, 3, 6) for c in (0, 3, 6))
        return all(sorted(unit) == list(range(1, 10)) for units in (self.rows, columns, boxes) for unit in units)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that are the same for equal boards, on every machine and in every version."""
        digits = "".join(str(value) for row in self.rows for value in row)
        return hashlib.sha256(digits.encode()).hexdigest()[:12]

    def place(self, move: Move) -> Board:
        """The board after the move. Whether the rules allow the number is not checked.

        Raises:
            ValueError: The move is out of range, or its cell is filled.
        """
        if not move.in_range:
            raise ValueError(f"row, column and number must lie in 1..9, not {move}")
        if self.number(move.cell):
            raise ValueError(f"{move} names a filled cell; empty ones are in 'empty_cells'")
        return self._with(move.cell, move.number)

    def _with(self, cell: Cell, value: int) -> Board:
        row = self.rows[cell.row - 1]
        changed = (*row[: cell.col - 1], value, *row[cell.col :])
        return Board((*self.rows[: cell.row - 1], changed, *self.rows[cell.row :]))

    def render(self) -> str:
        """The board exactly as TextArena shows it: 12 lines, no newline at the end."""
        lines = [_HEADER]
        for r, row in enumerate(self.rows, 1):
            cells = [f" {value or '.'} " for value in row]
            lines.append(f"R{r} " + "| ".join("".join(cells[i : i + 3]) for i in (0, 3, 6)).rstrip())
            if r in {3, 6}:
                lines.append(_RULER)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def parse_board(text: str) -> Board | None:
    """Read the last complete board of a text, which may hold a whole game; None when there is none.

    Args:
        text: Boards as TextArena shows them, among anything else.
    """
    boards = list(_BOARD.finditer(text))
    if not boards:
        return None
    cells = (re.findall(r"[.1-9]", row) for row in boards[-1].groups())
    return Board(tuple(tuple(0 if value == "." else int(value) for value in row) for row in cells))


def solve(board: Board) -> Board | None:
    """Find a solution by trying the cell with the fewest candidates first; None when there is none."""
    if board.is_solved:
        return board
    choices = [(board.candidates(cell), cell) for cell in board.empty_cells]
    if not choices:
        return None
    numbers, cell = min(choices, key=lambda choice: len(choice[0]))
    for number in numbers:
        solution = solve(board.place(Move(*cell, number)))
        if solution is not None:
            return solution
    return None


def random_puzzle(rng: random.Random, *, empty: int) -> tuple[Board, Board]:
    """Draw a puzzle and a solution of it.

    All solutions come from one grid by exchanging digits, bands, stacks, and rows and columns inside them. That is a
    tiny part of all grids; within it the digits that share three neighbouring cells of a row share three neighbouring
    cells in the other boxes of their band too. Few empty cells leave one solution; many may leave several.

    Args:
        rng: Where chance comes from; the same state gives the same puzzle.
        empty: How many cells to empty, 0..81.

    Returns:
        The puzzle and the solution that it was cut from.
    """
    digits = rng.sample(range(1, 10), 9)
    rows = [3 * band + row for band in rng.sample(range(3), 3) for row in rng.sample(range(3), 3)]
    cols = [3 * stack + col for stack in rng.sample(range(3), 3) for col in rng.sample(range(3), 3)]
    solution = Board(tuple(tuple(digits[(3 * r + r // 3 + c) % 9] for c in cols) for r in rows))
    puzzle = solution
    for index in rng.sample(range(81), empty):
        puzzle = puzzle._with(Cell(index // 9 + 1, index % 9 + 1), 0)
    return puzzle, solution


def _triple(index: int) -> range:
    """The three indices of the band or stack that holds an index; these count from 0."""
    start = index - index % 3
    return range(start, start + 3)

"""A frozen lake as an immutable value: make a random one, show it, find the way to the goal. Pure: no I/O."""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["DIRECTIONS", "Cell", "Lake", "parse_lake", "random_lake"]

DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""The change of row and column of each move."""

_MAP = re.compile(r"(?:^[SFHGP](?: [SFHGP])+$\n?)+", re.MULTILINE)


class Cell(NamedTuple):
    """A place on the lake; row and column count from 0 at the top left."""

    row: int
    col: int


@dataclass(frozen=True)
class Lake:
    """A square of cells: S start, G goal, F ice that holds, H a hole.

    Args:
        rows: One text of letters for each row, all of one length.
    """

    rows: tuple[str, ...]

    def at(self, cell: Cell) -> str:
        """The letter of a cell."""
        return self.rows[cell.row][cell.col]

    def find(self, letter: str) -> Cell:
        """The first cell with this letter.

        Raises:
            ValueError: There is none.
        """
        for row, letters in enumerate(self.rows):
            if letter in letters:
                return Cell(row, letters.index(letter))
        raise ValueError(f"the lake has no {letter!r}")

    def move(self, cell: Cell, direction: str) -> Cell:
        """The cell that a move from here leads to; at the edge of the lake one stays where one is."""
        row, col = (here + change for here, change in zip(cell, DIRECTIONS[direction], strict=True))
        inside = 0 <= row < len(self.rows) and 0 <= col < len(self.rows[0])
        return Cell(row, col) if inside else cell

    def distances(self) -> dict[Cell, int]:
        """The fewest moves to the goal from each cell that it can be reached from."""
        goal = self.find("G")
        distances = {goal: 0}
        queue = deque([goal])
        while queue:
            cell = queue.popleft()
            for direction in DIRECTIONS:
                neighbour = self.move(cell, direction)
                if neighbour not in distances and self.at(neighbour) != "H":
                    distances[neighbour] = distances[cell] + 1
                    queue.append(neighbour)
        return distances

    def path(self, start: Cell) -> list[str]:
        """The moves of a shortest way to the goal.

        Raises:
            ValueError: There is no way.
        """
        distances = self.distances()
        if start not in distances:
            raise ValueError(f"no way leads from row {start.row}, column {start.col} to the goal")
        moves: list[str] = []
        while distances[start]:
            nearer = distances[start] - 1
            moves.append(next(d for d in DIRECTIONS if distances.get(self.move(start, d)) == nearer))
            start = self.move(start, moves[-1])
        return moves

    def render(self, player: Cell) -> str:
        """The rows as a player sees them, with P where it stands."""
        letters = [list(row) for row in self.rows]
        letters[player.row][player.col] = "P"
        return "\n".join(" ".join(row) for row in letters)


def random_lake(rng: random.Random, *, size: int, p: float) -> Lake:
    """Draw a lake whose goal can be reached.

    Args:
        rng: Where chance comes from; the same state gives the same lake.
        size: Rows and columns, at least 2.
        p: How likely a cell is to hold, 0 to 1. A lake without a way to the goal is drawn again, so small values give
            starts beside the goal.
    """
    while True:
        letters = ["F" if rng.random() < p else "H" for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2)
        letters[start], letters[goal] = "S", "G"
        lake = Lake(tuple("".join(letters[row * size : (row + 1) * size]) for row in range(size)))
        if lake.find("S") in lake.distances():
            return lake


def parse_lake(text: str) -> tuple[Lake, Cell] | None:
    """Read the last map of a text.

    Returns:
        The lake and where the player stands, or None without a complete map. What lies under the player is not shown;
        it is taken for ice.
    """
    maps = _MAP.findall(text)
    rows = tuple(line.replace(" ", "") for line in maps[-1].splitlines()) if maps else ()
    letters = "".join(rows)
    if len({len(row) for row in rows}) != 1 or letters.count("P") != 1 or letters.count("G") != 1:
        return None
    return Lake(tuple(row.replace("P", "F") for row in rows)), Lake(rows).find("P")

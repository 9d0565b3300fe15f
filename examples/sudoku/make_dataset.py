"""Write a Sudoku dataset: one row for each puzzle, named by its seed; the server makes the puzzle itself."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.dataset import dataset_command
from examples.sudoku.example import EXAMPLE

DATASET = EXAMPLE.dataset
HELD_OUT_SEED = EXAMPLE.held_out_seed

if __name__ == "__main__":
    typer.run(dataset_command(EXAMPLE))

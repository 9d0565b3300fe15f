"""Write the dataset of a game: ``python examples/make_dataset.py frozen_lake --count 512``."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.dataset import dataset_command
from examples.registry import EXAMPLES

app = typer.Typer(add_completion=False, no_args_is_help=True)
for example in EXAMPLES.values():
    app.command(example.name)(dataset_command(example))

if __name__ == "__main__":
    app()

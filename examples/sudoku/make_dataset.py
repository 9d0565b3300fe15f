"""Write a Sudoku dataset: one row for each puzzle, named by its seed; the server makes the puzzle itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

DATASET = Path(__file__).with_name("sudoku.jsonl")
HELD_OUT_SEED = 1_000_000
"""Seeds from here on are for evaluation; neither the dataset nor the embedded policy's training uses them."""


def rows(count: int, *, first_seed: int = 0, base_url: str = "http://127.0.0.1:8000") -> Iterator[dict[str, Any]]:
    """Rows for ``count`` puzzles."""
    for seed in range(first_seed, first_seed + count):
        env_config = {"name": "openenv", "base_url": base_url, "reset_kwargs": {"seed": seed}}
        yield {"messages": [{"role": "user", "content": "Play"}], "env_config": env_config}


def main(
    output: Annotated[Path, typer.Option(help="The file to write.")] = DATASET,
    count: Annotated[int, typer.Option(min=1, help="How many puzzles.")] = 256,
    first_seed: Annotated[int, typer.Option(min=0, help="The first puzzle's seed; the next ones count up.")] = 0,
    base_url: Annotated[str, typer.Option(help="Where the environment server runs.")] = "http://127.0.0.1:8000",
) -> None:
    """Write a Sudoku dataset as JSON lines."""
    if first_seed < HELD_OUT_SEED < first_seed + count:
        raise typer.BadParameter(f"seeds from {HELD_OUT_SEED} on are held out for evaluation; choose a smaller range")
    lines = [json.dumps(row) + "\n" for row in rows(count, first_seed=first_seed, base_url=base_url)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(lines), encoding="utf-8")
    typer.echo(f"{count} rows in {output}")


if __name__ == "__main__":
    typer.run(main)

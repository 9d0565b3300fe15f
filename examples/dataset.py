"""The command that writes a game's dataset: one row for each seed; the environment makes the game itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from examples.example import BASE_URL, Example
from openenv_client import ConfigurationError
from openenv_client.protocol import websocket_url

__all__ = ["dataset_command"]


def dataset_command(example: Example) -> Callable[..., None]:
    """A function for typer that writes datasets of a game."""

    def write(
        output: Annotated[Path, typer.Option(help="The file to write.")] = example.dataset,
        count: Annotated[int, typer.Option(min=1, help="How many games.")] = 256,
        first_seed: Annotated[int, typer.Option(min=0, help="The first game's seed; the next ones count up.")] = 0,
        base_url: Annotated[
            str | None, typer.Option(help="Where the environment server runs.", show_default=BASE_URL)
        ] = None,
    ) -> None:
        held_out = example.held_out_seed
        if first_seed < held_out < first_seed + count:
            raise typer.BadParameter(f"seeds from {held_out} on are held out for evaluation; choose a smaller range")
        if base_url is not None and example.env_id is None:
            raise typer.BadParameter(f"{example.name} needs no server: leave --base-url out")
        if base_url is not None:
            try:
                websocket_url(base_url)
            except ConfigurationError as error:
                raise typer.BadParameter(str(error), param_hint="'--base-url'") from None
        rows = [example.row(seed, base_url=base_url or BASE_URL) for seed in range(first_seed, first_seed + count)]
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{output}: {error.strerror}; name another", param_hint="'--output'") from None
        typer.echo(f"{count} rows in {output}")

    write.__doc__ = f"Write a dataset of {example.name} as JSON lines."
    return write

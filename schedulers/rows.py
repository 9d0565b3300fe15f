"""Rows of a dataset: JSON lines, each of which names a game or asks a question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedulers.types import RolloutInferRequest

__all__ = ["read_rows", "without_address"]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is no row, or there is none; names the line.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            RolloutInferRequest.from_row(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}; each line must be a row as JSON") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows; each line must be a row as JSON")
    return rows


def without_address(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its server's address, which says where a game was played and nothing of the game."""
    config = {key: value for key, value in (row.get("env_config") or {}).items() if key != "base_url"}
    return {**row, "env_config": config}

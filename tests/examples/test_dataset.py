"""The commands that write datasets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.make_dataset import app
from examples.registry import EXAMPLES

ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    output = tmp_path / "new" / "rows.jsonl"
    result = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_dataset_of_the_example_is_what_the_command_writes(name: str, tmp_path: Path) -> None:
    rows = write(tmp_path, name)
    assert rows == [json.loads(line) for line in EXAMPLES[name].dataset.read_text().splitlines()]
    assert rows == [EXAMPLES[name].row(seed) for seed in range(256)]


def test_options(tmp_path: Path) -> None:
    assert write(tmp_path, "mastermind", "--count", "2", "--first-seed", "7", "--base-url", "http://far:1") == [
        {
            "messages": [{"role": "user", "content": "Play"}],
            "env_config": {"name": "openenv", "base_url": "http://far:1", "reset_kwargs": {"seed": seed}},
        }
        for seed in (7, 8)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sudoku", "--first-seed", "999999", "--count", "2"], "held out"),
        (["frozen_lake", "--base-url", "http://far:1"], "frozen_lake needs no server"),
        (["sudoku", "--base-url", "ftp://far"], "'ftp://far' has a scheme other than http, https, ws, wss."),
        (["sudoku", "--base-url", "http//far"], "for example http://127.0.0.1:8000."),
        (["sudoku", "--base-url", ""], "'--base-url': base_url '' is not an address."),
        (["frozen_lake", "--count", "0"], "--count"),
        (["chess"], "chess"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    """Nothing is written, and the error names what is wrong."""
    result = CliRunner().invoke(app, [*arguments, *(["--output", str(tmp_path / "x")] if len(arguments) > 1 else [])])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "x").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sudoku", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "'--output': " in result.output


@pytest.mark.parametrize("script", ["examples/make_dataset.py frozen_lake", "examples/sudoku/make_dataset.py"])
def test_scripts_run_from_anywhere(script: str, tmp_path: Path) -> None:
    file, *game = script.split()
    command = [sys.executable, str(ROOT / file), *game, "--count", "3", "--output", "rows.jsonl"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3

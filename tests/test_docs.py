"""The code in README and docs runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server_scripts.launch import ServerProcess

ROOT = Path(__file__).parents[1]
ADDRESS = "http://127.0.0.1:8000"


def snippets(document: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def run(code: str, base_url: str, folder: Path) -> str:
    assert ADDRESS in code
    script = folder / "snippet.py"
    script.write_text(code.replace(ADDRESS, base_url).replace("outputs/trl", str(folder)), encoding="utf-8")
    python = [sys.executable, "-W", "ignore::FutureWarning", str(script)]
    done = subprocess.run(python, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture
def sudoku(environment_server: Callable[..., ServerProcess]) -> str:
    return environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=16).base_url


def test_readme_rollouts(sudoku: str, tmp_path: Path) -> None:
    """README: eight games with the embedded policy end with their rewards."""
    lines = run(snippets("README.md")[0], sudoku, tmp_path).splitlines()
    assert len(lines) == 8
    assert all("correct_reward" in line for line in lines)


def test_readme_client(sudoku: str, tmp_path: Path) -> None:
    """README: the client alone resets and steps."""
    run(snippets("README.md")[1], sudoku, tmp_path)


def test_add_a_game(environment_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """docs/how-to/add-a-game.md: the new game is played to its end and rewarded by its own components."""
    server = environment_server(env_id="GuessTheNumber-v0", max_concurrent_envs=4)
    game, play = snippets("docs/how-to/add-a-game.md")
    assert len(game.splitlines()) < 48
    (tmp_path / "guess.py").write_text(game)
    output = run(play, server.base_url, tmp_path)
    assert output.startswith("env_done {'narrowing_reward': ")


def test_train_with_trl(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/train-with-trl.md: one step of training with four games."""
    run(snippets("docs/how-to/train-with-trl.md")[0], sudoku, tmp_path)

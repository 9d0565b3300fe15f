"""The entry point, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path = ROOT, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``main`` with a line of Python before it."""
    code = f"import sys; sys.path.append({str(ROOT)!r}); {before}\nfrom schedulers.cli import main; main()"
    # -P: the current folder is not on the path, as it is not for an installed console script.
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={"COLUMNS": "120"})


def test_help_is_there() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "openenv-rollout [OPTIONS] COMMAND" in done.stdout


def test_without_arguments_it_shows_its_help() -> None:
    done = run()
    assert "Usage: openenv-rollout" in done.stdout + done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_what_is_not_installed_is_named(package: str) -> None:
    """The base installation has the command but not what it needs."""
    hide = (
        "import importlib.abc\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}: raise ModuleNotFoundError(name, name={package!r})\n"
        "sys.meta_path.insert(0, Hide())"
    )
    done = run("--help", before=hide)
    assert done.returncode == 2
    assert done.stderr == f'openenv-rollout needs {package}: pip install "openenv-client[cli]"\n'


def test_current_folder_is_searched(tmp_path: Path) -> None:
    """A game of one's own needs no installation and no path."""
    (tmp_path / "my_game.py").write_text("x = 1\n")
    done = run("eval", "--scheduler", "my_game:Missing", cwd=tmp_path)
    assert done.returncode == 2
    assert "--scheduler my_game:Missing: my_game has no 'Missing'" in done.stderr


def test_command_is_declared() -> None:
    assert 'openenv-rollout = "schedulers.cli:main"' in (ROOT / "pyproject.toml").read_text()

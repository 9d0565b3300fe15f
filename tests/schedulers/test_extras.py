"""Where a library cannot be imported, the error says what to install, or which file is in its way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from schedulers.extras import missing_extra

ROOT = Path(__file__).parents[2]


def test_a_library_that_is_missing_or_broken_is_to_be_installed() -> None:
    error = missing_extra("it needs these", "train", "no_such_library", "pytest")
    assert str(error) == 'it needs these: pip install "openenv-client[train]"'


def test_a_file_with_the_name_of_a_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some_library.py"
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    error = missing_extra("it needs these", "train", "pytest", "some_library")
    assert str(error) == f"it needs these, but {file} is found in the place of some_library: rename that file"


def test_a_users_script_that_is_called_like_the_library_which_it_uses_is_named(tmp_path: Path) -> None:
    """It imports itself in the place of the library."""
    script = tmp_path / "httpx2.py"
    script.write_text("from schedulers.engines.openai import OpenAIEngine")
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: OpenAIEngine needs httpx2, but {script} is found in the place of httpx2: rename that file"
    )

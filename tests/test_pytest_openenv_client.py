"""The plugin gives users a fixture, and costs nothing where they do not use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest_openenv_client

ROOT = Path(__file__).parents[1]

USERS_TESTS = """
from openenv_client import OpenEnvWrapper

def test_my_scheduler(mock_env_server):
    mock_env_server.script = [{"observation": {"board": "..."}}, {"observation": {}, "reward": 1.0, "done": True}]
    with OpenEnvWrapper(base_url=mock_env_server.base_url) as env:
        env.reset()
        assert env.step({"message": "x"}).done
    assert mock_env_server.sessions == 0

def test_the_next_test_has_a_server_of_its_own(mock_env_server):
    assert mock_env_server.received == []
"""

A_SCRIPT_THAT_ASSERTS = """
import pytest
from openenv_client import EnvironmentFailedError, OpenEnvWrapper

def test_it(mock_env_server):
    def script(reset_kwargs):
        assert reset_kwargs == {"seed": 1}
    mock_env_server.script = script
    with OpenEnvWrapper(base_url=mock_env_server.base_url) as env, pytest.raises(EnvironmentFailedError):
        env.reset(seed=2)
"""

A_TEST_OF_SOMETHING_ELSE = """
import sys

def test_it():
    assert "pytest_openenv_client" in sys.modules
    assert not {"openenv_client", "websockets"} & sys.modules.keys()
"""


def run(folder: Path, code: str, **environment: str) -> str:
    (folder / "test_it.py").write_text(code)
    plugin = ["-p", "pytest_openenv_client", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, str(folder / "test_it.py")]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_fixture_works_in_a_users_tests(tmp_path: Path) -> None:
    output = run(tmp_path, USERS_TESTS)
    assert "2 passed" in output, output


def test_what_a_script_asserts_fails_the_users_test(tmp_path: Path) -> None:
    output = run(tmp_path, A_SCRIPT_THAT_ASSERTS)
    assert "1 passed, 1 error" in output, output
    assert "assert reset_kwargs ==" in output


def test_tests_that_do_not_use_the_fixture_load_neither_the_client_nor_websockets(tmp_path: Path) -> None:
    output = run(tmp_path, A_TEST_OF_SOMETHING_ELSE, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in output, output


def test_an_installed_package_tells_pytest_of_the_fixture() -> None:
    [line] = re.findall(r"^\[project\.entry-points\.pytest11\]\n(.*)$", (ROOT / "pyproject.toml").read_text(), re.M)
    name = pytest_openenv_client.__name__
    assert line == f'"{name}" = "{name}"'  # one name for both, so that pytest does not take it for two plugins
    assert f'py-modules = ["{name}"]' in (ROOT / "pyproject.toml").read_text()

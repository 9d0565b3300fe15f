from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

A_USERS_TEST = """
from openenv_client import OpenEnvWrapper

def test_my_scheduler(mock_env_server):
    mock_env_server.script = [{"observation": {"board": "..."}}, {"observation": {}, "reward": 1.0, "done": True}]
    with OpenEnvWrapper(base_url=mock_env_server.base_url) as env:
        env.reset()
        assert env.step({"message": "x"}).done
    assert mock_env_server.sessions == 0
"""


def test_the_fixture_works_in_a_users_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(A_USERS_TEST)
    plugin = ["-p", "openenv_client.pytest_plugin", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, str(tmp_path / "test_it.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr

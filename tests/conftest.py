"""Real environment servers for every test that wants one, each started once and shared."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server_scripts.launch import ServerProcess

ROOT = Path(__file__).parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts tests in the background ignores it, for them and for the programs that they interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def environment_server() -> Iterator[Callable[..., ServerProcess]]:
    """Give a running server: ``environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=16)``.

    The same arguments give the same server, since one takes seconds to start. At the end of the run every server must
    have no session left, stop on SIGTERM, and have printed nothing after its first lines.
    """
    servers: dict[tuple[str, int], ServerProcess] = {}
    greetings: dict[tuple[str, int], str] = {}

    def start(*, env_id: str = "Sudoku-v0-very-easy", max_concurrent_envs: int = 16) -> ServerProcess:
        key = (env_id, max_concurrent_envs)
        if key not in servers:
            servers[key] = ServerProcess(env_id=env_id, max_concurrent_envs=max_concurrent_envs).start()
            greetings[key] = servers[key].output
        return servers[key]

    try:
        yield start
        for key, server in servers.items():
            server.wait_until_idle()
            assert server.output == greetings[key]
    finally:
        codes = [server.stop() for server in servers.values()]
    assert set(codes) <= {128 + signal.SIGTERM}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, for tests that are marked ``smollm2``: where ``make smollm2`` puts it.

    If it is not there, the real command makes it, and downloads 98 MB.
    """
    script = ROOT / "examples" / "sudoku" / "prepare_smollm2.py"
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ROOT / "models" / "SmolLM2-135M-Instruct"

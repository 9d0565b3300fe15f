"""Servers as child processes: their start, their end, and the end of their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from server_scripts import launch
from server_scripts.guard import TokenError
from server_scripts.launch import ServerProcess, ServerStartError, Sessions, count_sessions

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """
import http.server, json, os, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"active": 1, "max": 5}).encode()
        token = os.environ.get("OPENENV_TOKEN")
        wanted = token and f"Bearer {token}"
        self.send_response(404 if self.path != "/sessions" else 200 if self.headers["Authorization"] == wanted else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--silent" not in sys.argv:
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    print(f'Stand-in: base_url="http://127.0.0.1:{server.server_port}"', flush=True)
    server.serve_forever()
print("I will not say where I am", flush=True)
signal.pause()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a small program in place of the server, which takes seconds to import what it needs."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(launch, "_SCRIPT", script)


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that starts a real server, prints its address and waits."""
    program = """
        import signal
        from server_scripts.launch import ServerProcess
        with ServerProcess(env_id="Sudoku-v0-very-easy") as server:
            print(server.base_url, flush=True)
            signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("stand_in")
def test_the_block_is_the_life_of_the_server() -> None:
    """Inside the block the server answers, after it the process has ended by SIGTERM."""
    with ServerProcess() as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert server.count_sessions() == count_sessions(server.base_url + "/") == Sessions(active=1, maximum=5)
        assert server.output.startswith("Stand-in")
    assert server.output.startswith("Stand-in")
    assert server.process.returncode == -signal.SIGTERM
    assert server.stop() == -signal.SIGTERM


@pytest.mark.usefixtures("stand_in")
def test_a_token_is_handed_over_in_the_environment() -> None:
    """The server gets it, its readiness and its sessions are asked for with it, and it is shown nowhere."""
    with ServerProcess(token="a-token-of-the-tests") as server:
        assert server.count_sessions() == Sessions(active=1, maximum=5)
        with pytest.raises(OSError, match="answered 401"):
            count_sessions(server.base_url)
        assert "a-token" not in repr(server) + str(server.process.args)


@pytest.mark.usefixtures("stand_in")
def test_a_token_of_another_server_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPENENV_TOKEN may be that of a server to which this process is a client."""
    monkeypatch.setenv("OPENENV_TOKEN", "a-token-of-the-tests")
    with ServerProcess() as server:
        assert server.count_sessions().active == 1


def test_a_token_that_cannot_be_one_is_refused_and_not_shown() -> None:
    for use in (
        lambda token: ServerProcess(token=token),
        lambda token: count_sessions("http://127.0.0.1:9", token=token),
    ):
        with pytest.raises(TokenError) as caught:
            use("secret\r\nX-Header: 1")
        assert "secret" not in str(caught.value).partition("Make one")[0]


@pytest.mark.usefixtures("stand_in")
def test_a_server_is_started_once() -> None:
    with ServerProcess() as server, pytest.raises(RuntimeError, match="started before"):
        server.start()


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_does_not_stop_is_killed() -> None:
    server = ServerProcess(options=["--stubborn"], stop_timeout=0.1).start()
    assert server.stop() == -signal.SIGKILL


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_is_not_ready_in_time_is_an_error_and_is_stopped() -> None:
    server = ServerProcess(options=["--silent"], start_timeout=0.0)
    with pytest.raises(ServerStartError, match="not ready within 0 s"):
        server.start()
    assert server.process.returncode == -signal.SIGTERM


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_stays_busy_is_reported() -> None:
    with ServerProcess() as server, pytest.raises(TimeoutError, match="1 sessions are still open after 0 s"):
        server.wait_until_idle(timeout=0.0)


def test_a_server_that_does_not_start_tells_why() -> None:
    """The error carries what the server printed."""
    with pytest.raises(ServerStartError, match="ended with code 2") as caught:
        ServerProcess(env_id="Sudoku-v0-hrd").start()
    assert "Sudoku-v0-hard" in caught.value.output


def test_a_server_that_was_not_started_has_no_process() -> None:
    server = ServerProcess()
    assert server.stop() is None
    assert (server.output, server.base_url) == ("", "")
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.process


def test_the_server_ends_with_its_parent(parent: subprocess.Popen[str]) -> None:
    """A parent that is killed outright takes the server with it, and so its sessions."""
    assert parent.stdout is not None
    base_url = parent.stdout.readline().strip()
    with connect(base_url.replace("http", "ws") + "/ws") as session:
        parent.kill()
        with pytest.raises(ConnectionClosed):
            session.recv()

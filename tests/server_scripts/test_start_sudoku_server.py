"""The command that starts the server: its settings, its refusals, its limits and its end."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from openenv_client import OpenEnvWrapper
from server_scripts.launch import ServerProcess, count_sessions
from server_scripts.start_sudoku_server import VARIABLES, _seconds, _token, app

SCRIPT = Path(__file__).resolve().parents[2] / "server_scripts" / "start_sudoku_server.py"
SLOW_SEED = 5  # takes seconds to make with 20 clues
LIMIT = 2**20 + 2**16
TOKEN = "a-token-of-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}

# Runs at the start of every interpreter that has its folder on PYTHONPATH.
NO_NETWORK = """
import sys

def refuse(event, args):
    host = args[0] if event == "socket.getaddrinfo" else args[1][0] if event == "socket.connect" else "127.0.0.1"
    if host not in ("127.0.0.1", "localhost", "0.0.0.0"):
        sys.stderr.write(f"NETWORK USED: {event} {host}\\n")
        raise OSError("there is no network")

sys.addaudithook(refuse)
"""


@contextmanager
def session(server: ServerProcess, **settings: Any) -> Iterator[ClientConnection]:
    with connect(server.base_url.replace("http", "ws") + "/ws", proxy=None, **settings) as connection:
        yield connection


def ask(connection: ClientConnection, kind: str, **data: Any) -> Any:
    connection.send(json.dumps({"type": kind, "data": data}))
    return json.loads(connection.recv())


def status(server: ServerProcess, path: str, *, method: str = "GET", **headers: str) -> int:
    """The HTTP status that a request gets."""
    url = urlsplit(server.base_url)
    with closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)) as connection:
        body = "{}" if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return connection.getresponse().status


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the command in this process, where it must refuse to start, and give what it says on one line."""
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments: str, **variables: str) -> str:
        result = CliRunner().invoke(app, arguments, env={"PORT": "0", "COLUMNS": "200", **variables})
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    return run


@pytest.fixture(scope="module")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on all interfaces, without a network, with settings from variables and from options."""
    folder = tmp_path_factory.mktemp("no_network")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    variables = {
        "PYTHONPATH": str(folder),
        "NO_PROXY": "localhost",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "TEXTARENA_ENV_ID": "Sudoku-v0-nonsense",
        "TEXTARENA_CLUES": "80",
        "UVICORN_WS_MAX_SIZE": str(LIMIT),
        "UVICORN_WS_PING_INTERVAL": "0.2",
        "UVICORN_LOG_LEVEL": "ERROR",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        options = ["--ws-ping-timeout", "2"]
        server = ServerProcess(env_id="Sudoku-v0", host="0.0.0.0", options=options).start()  # noqa: S104
    try:
        yield server
    finally:
        assert server.stop() == 128 + signal.SIGTERM
        assert "Traceback" not in server.output


@pytest.fixture(scope="module")
def secret_server() -> Iterator[ServerProcess]:
    """A server on all interfaces that wants a token, tells all that it does, and closes idle sessions soon."""
    options = ["--log-level", "debug", "--session-timeout", "0.5"]
    with ServerProcess(env_id="Sudoku-v0-very-easy", host="0.0.0.0", options=options, token=TOKEN) as server:  # noqa: S104
        yield server
    assert not {"Traceback", "ERROR"} & set(re.findall("[A-Za-z]+", server.output))


def help_text(columns: int) -> str:
    """What ``--help`` prints, where no package of the server can be imported."""
    program = f"""
import runpy, sys
for slow in ("openenv", "textarena", "uvicorn"):
    sys.modules[slow] = None
sys.argv = ["start_sudoku_server.py", "--help"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    environment = {**os.environ, "COLUMNS": str(columns), "OPENENV_TOKEN": TOKEN}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


def test_help_names_every_variable() -> None:
    """`--help` shows the variable of each setting, and waits for no import of a server package."""
    text = help_text(200)
    for variable in VARIABLES.values():
        assert variable in text
    assert "0 or none" in text
    assert TOKEN not in text


def test_help_fits_a_narrow_terminal() -> None:
    """In 80 columns no line is longer, no word is cut, and an option takes five lines at most."""
    lines = help_text(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    starts = [number for number, line in enumerate(lines) if line.startswith("  --")]
    assert max(end - start for start, end in itertools.pairwise(starts)) <= 5


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (["--port", "abc"], {}, ["'--port' (env var: 'PORT')", "integer"]),
        (["--port", "-1"], {}, ["'--port'", "0"]),
        ([], {"PORT": "70000"}, ["'--port' (env var: 'PORT')", "65535"]),
        ([], {"MAX_CONCURRENT_ENVS": "0"}, ["'--max-concurrent-envs' (env var: 'MAX_CONCURRENT_ENVS')", "1"]),
        ([], {"MAX_CONCURRENT_ENVS": "many"}, ["'MAX_CONCURRENT_ENVS'", "integer"]),
        (["--env-id", "Sudoku-v0-hrd"], {}, ["'--env-id' (env var: 'TEXTARENA_ENV_ID')", "Sudoku-v0-hard"]),
        ([], {"TEXTARENA_ENV_ID": "Chess"}, ["'TEXTARENA_ENV_ID'", "Chess-v0"]),
        (["--env-id", "TicTacToe-v0"], {}, ["'--env-id'", "not a game of one player"]),
        (["--env-id", "GuessTheNumber-v0", "--clues", "40"], {}, ["'--clues'", "takes min_number, max_number"]),
        (["--clues", "5"], {}, ["'--clues' (env var: 'TEXTARENA_CLUES')", "17"]),
        (["--max-turns", "0"], {}, ["'--max-turns' (env var: 'TEXTARENA_MAX_TURNS')", "1"]),
        (["--ws-max-size", "0"], {}, ["'--ws-max-size' (env var: 'UVICORN_WS_MAX_SIZE')", "1024"]),
        (
            ["--ws-ping-interval", "-1"],
            {},
            ["'--ws-ping-interval' (env var: 'UVICORN_WS_PING_INTERVAL')", "'-1'", "none"],
        ),
        (
            [],
            {"UVICORN_WS_PING_TIMEOUT": "soon"},
            ["'--ws-ping-timeout' (env var: 'UVICORN_WS_PING_TIMEOUT')", "'soon'", "none"],
        ),
        (["--session-timeout", "-1"], {}, ["'--session-timeout' (env var: 'SESSION_TIMEOUT')", "'-1'", "none"]),
        (["--token-file", "nowhere"], {}, ["'--token-file'", "nowhere cannot be read: No such file"]),
        (["--token", TOKEN], {}, ["No such option", "--token"]),
        (["--log-level", "loud"], {}, ["'--log-level' (env var: 'UVICORN_LOG_LEVEL')", "warning"]),
        (["--host", "no host"], {}, ["'--host' (env var: 'HOST')", "'no host'"]),
        (["--workers", "2"], {}, ["No such option", "--workers"]),
    ],
)
def test_a_bad_value_is_refused_by_name(
    run: Callable[..., str], arguments: list[str], variables: dict[str, str], expected: list[str]
) -> None:
    """U08, S10: Wrong values end the program at once with the option, the variable and what is accepted."""
    said = run(*arguments, **variables)
    for text in expected:
        assert text in said


@pytest.mark.parametrize("token", ["", "short-secret", "a secret with blanks", "a-secret-with-an-ö"])
def test_a_bad_token_is_refused_and_not_shown(run: Callable[..., str], token: str, tmp_path: Path) -> None:
    """Neither an empty variable nor an empty file leaves the server open to all."""
    file = tmp_path / "token"
    file.write_text(token + "\n", encoding="utf-8")
    for said in (run(OPENENV_TOKEN=token), run("--token-file", str(file), OPENENV_TOKEN=TOKEN)):
        assert "'--token-file' (env var: 'OPENENV_TOKEN'): the token must be 16 to 4096 visible ASCII" in said
        assert "secret" not in said.partition("Make one")[0].partition("token must be")[2]


def test_the_token_is_in_the_file_or_in_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file wins; line breaks at its end are not part of the token; no child process inherits the variable."""
    monkeypatch.delenv("OPENENV_TOKEN", raising=False)
    assert _token(None) is None
    file = tmp_path / "token"
    file.write_bytes(TOKEN.encode() + b"\r\n")
    monkeypatch.setenv("OPENENV_TOKEN", "another-token-of-the-tests")
    assert _token(file) == TOKEN
    assert "OPENENV_TOKEN" not in os.environ
    monkeypatch.setenv("OPENENV_TOKEN", TOKEN)
    assert _token(None) == TOKEN


def test_a_port_in_use_is_said_to_be(run: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = run("--port", str(port))
    assert "'--port' (env var: 'PORT')" in said
    assert f"port {port} of 127.0.0.1 is in use" in said


@pytest.mark.parametrize(("text", "seconds"), [("0", None), ("none", None), ("None", None), ("2.5", 2.5), ("30", 30.0)])
def test_pings_are_switched_off_by_0_and_none(text: str, seconds: float | None) -> None:
    """U08: The documented values work."""
    assert _seconds("ws_ping_timeout", text) == seconds


@pytest.mark.parametrize("text", ["", "nan", "inf", "1s"])
def test_what_is_no_number_of_seconds_is_refused(run: Callable[..., str], text: str) -> None:
    """U08: Wrong values are refused at start."""
    assert "'--ws-ping-timeout'" in run("--ws-ping-timeout", text)


def test_it_starts_without_a_network(limited_server: ServerProcess) -> None:
    """S11: With no network and with NO_PROXY set it starts, and tries to fetch nothing."""
    assert "NETWORK USED" not in limited_server.output


def test_an_address_that_others_can_reach_is_warned_of(limited_server: ServerProcess) -> None:
    """The bound address is printed as it is; the snippet has one that can be connected to."""
    port = urlsplit(limited_server.base_url).port
    assert "Warning: other machines can reach 0.0.0.0, and anyone there can play." in limited_server.output
    assert "Set OPENENV_TOKEN to a token that clients must send." in limited_server.output
    assert "put a proxy that does in front of it" in limited_server.output
    assert f"is ready at http://0.0.0.0:{port} " in limited_server.output
    assert f'OpenEnvWrapper(base_url="http://127.0.0.1:{port}")' in limited_server.output


def test_with_a_token_only_the_missing_tls_is_warned_of(secret_server: ServerProcess) -> None:
    """The snippet says that there is a token, and not which."""
    assert "Warning: other machines can reach 0.0.0.0, and the token can be read on the way." in secret_server.output
    assert "OPENENV_TOKEN" not in secret_server.output
    assert f'OpenEnvWrapper(base_url="{secret_server.base_url}", token=…)' in secret_server.output


def test_without_the_token_there_is_no_session(secret_server: ServerProcess) -> None:
    """A handshake and every HTTP route answer 401; the health check tells nothing and is open."""
    for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}):
        with pytest.raises(InvalidStatus) as refused, session(secret_server, additional_headers=headers):
            pass
        assert refused.value.response.status_code == 401
        assert refused.value.response.headers["WWW-Authenticate"] == "Bearer"
    assert status(secret_server, "/health") == 200
    for path in ("/sessions", "/docs", "/openapi.json", "/schema", "/metadata", "/state", "/nowhere"):
        assert status(secret_server, path) == 401
        assert status(secret_server, path, **BEARER) == (404 if path == "/nowhere" else 200)
    for path in ("/reset", "/step"):
        assert status(secret_server, path, method="POST") == 401
    assert status(secret_server, "/reset", method="POST", **BEARER) == 200
    with pytest.raises(OSError, match="answered 401"):
        count_sessions(secret_server.base_url, token="another-token-of-the-tests")
    assert secret_server.count_sessions().active == 0


def test_a_web_page_opens_no_session(
    limited_server: ServerProcess, environment_server: Callable[..., ServerProcess]
) -> None:
    """Not one of another site, and, where only this machine listens, not one whose name was made to point here."""
    with pytest.raises(InvalidStatus, match="403"), session(limited_server, origin="https://other.example"):
        pass
    local = environment_server()
    assert status(local, "/sessions", Host="rebound.example") == 403
    assert (
        status(local, "/sessions", Host="localhost:1") == status(limited_server, "/sessions", Host="a.example") == 200
    )


def test_with_the_token_games_are_played_and_it_is_in_no_log(secret_server: ServerProcess) -> None:
    """At the level that tells most, and on the command line, which everyone on the machine can read."""
    with session(secret_server, additional_headers=BEARER) as connection:
        assert ask(connection, "reset", seed=1)["type"] == "observation"
    assert '"WebSocket /ws" [accepted]' in secret_server.output
    assert TOKEN not in secret_server.output
    assert TOKEN not in Path(f"/proc/{secret_server.process.pid}/cmdline").read_text()
    assert TOKEN not in repr(secret_server)


def test_a_session_that_asks_for_nothing_is_closed(secret_server: ServerProcess) -> None:
    """Its slot is free again."""
    with session(secret_server, additional_headers=BEARER) as connection:
        ask(connection, "reset", seed=1)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (3008, "no message for 0.5 s")
    secret_server.wait_until_idle()


def test_a_seeded_game_whose_session_was_closed_is_rebuilt(secret_server: ServerProcess) -> None:
    """A client that took too long for its move loses its session, and goes on in a new one with its token."""
    with OpenEnvWrapper(base_url=secret_server.base_url, token=TOKEN) as env:
        env.reset(seed=1)
        secret_server.wait_until_idle()
        env.step({"message": "[1 1 1]"})
        assert len(env.recoveries) == 1


def test_the_option_beats_the_variable(limited_server: ServerProcess) -> None:
    """The id of the option is played, with the clues of the variable."""
    with session(limited_server) as connection:
        observation = ask(connection, "reset", seed=1)["data"]["observation"]
    assert observation["info"]["env_id"] == "Sudoku-v0"
    assert sum(number == 0 for row in observation["board"] for number in row) == 1


def test_messages_above_a_mebibyte_pass(limited_server: ServerProcess) -> None:
    """W07: An action and an observation of more than 1 MiB are no trouble."""
    with session(limited_server, max_size=2**22) as connection:
        ask(connection, "reset")
        answer = ask(connection, "step", message="x" * (2**20 + 10))
    assert len(answer["data"]["observation"]["messages"][0]["content"]) > 2**20


def test_a_message_above_the_limit_ends_its_session_only(limited_server: ServerProcess) -> None:
    """W08: The limit is finite; the session is closed with 1009 and another goes on."""
    with session(limited_server, compression=None) as large, session(limited_server) as other:
        ask(large, "reset")
        ask(other, "reset")
        with pytest.raises(ConnectionClosed) as closed:
            ask(large, "step", message="x" * LIMIT)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert ask(other, "step", message="[1 1 1]")["type"] == "observation"


def test_a_client_that_answers_no_ping_is_dropped(limited_server: ServerProcess) -> None:
    """W05: A peer that is silent for longer than the settings allow is closed with 1011, and its slot is freed."""
    url = urlsplit(limited_server.base_url)
    assert url.port is not None
    key = base64.b64encode(os.urandom(16)).decode()
    request = (
        f"GET /ws HTTP/1.1\r\nHost: {url.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    )
    with socket.create_connection((url.hostname, url.port), timeout=60) as silent:
        silent.sendall(request.encode())
        received = b""
        while chunk := silent.recv(4096):
            received += chunk
            if b"keepalive" in received:
                break
        assert (1011).to_bytes(2, "big") + b"keepalive ping timeout" in received
    limited_server.wait_until_idle()


def test_interrupt_stops_it_while_clients_are_connected_and_a_step_is_being_made() -> None:
    """S08, W06: A puzzle being made holds up no other session's step; Ctrl-C ends both sessions and the process."""
    with ServerProcess(env_id="Sudoku-v0-hard", max_concurrent_envs=2) as server:
        with session(server) as busy, session(server, ping_interval=0.1, ping_timeout=10) as other:
            ask(other, "reset", seed=1)
            busy.send(json.dumps({"type": "reset", "data": {"seed": SLOW_SEED}}))
            assert ask(other, "step", message="[1 1 1]")["type"] == "observation"
            with pytest.raises(TimeoutError):
                busy.recv(timeout=0)
            server.process.send_signal(signal.SIGINT)
            for connection in (busy, other):
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1012
        assert server.process.wait(timeout=60) == 128 + signal.SIGINT
        assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("package", ["typer", "textarena", "uvicorn"])
def test_an_interrupt_while_it_imports_ends_it_quietly(package: str, number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in the first seconds is no error: no traceback, and the exit code that says what ended it."""
    (tmp_path / f"{package}.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    command = [sys.executable, str(SCRIPT), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.stdout.read() == ""
    assert process.returncode == 128 + number

"""Start the environment server as a child process that cannot outlive its parent. Needs the standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

from server_scripts.guard import checked_token

__all__ = ["ServerProcess", "ServerStartError", "Sessions", "count_sessions"]

_SCRIPT = Path(__file__).resolve().with_name("start_sudoku_server.py")
_ADDRESS = re.compile(r'base_url="(http://[^"]+)"')  # the one to connect to; 0.0.0.0 is not
_TOKEN_VARIABLE = "OPENENV_TOKEN"  # noqa: S105 - its name
_POLL_SECONDS = 0.05


class ServerStartError(RuntimeError):
    """The server did not start.

    Attributes:
        output: What it printed.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(f"{message} It printed:\n{output}" if output else message)
        self.output = output


@dataclass(frozen=True)
class Sessions:
    """How many sessions a server has open (`active`), and how many it allows (`maximum`)."""

    active: int
    maximum: int


def count_sessions(base_url: str, *, timeout: float = 5.0, token: str | None = None) -> Sessions:
    """Ask a server that was started from here how many sessions are open.

    Args:
        base_url: Its address, as it printed it.
        timeout: Seconds.
        token: The server's, if it has one.

    Raises:
        OSError: It cannot be reached, wants another token, or is another kind of server that does not tell.
        TokenError: The token cannot be one of a server.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {checked_token(token)}"}
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout)  # obeys no proxy variable
    with contextlib.closing(connection):
        connection.request("GET", "/sessions", headers=headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise OSError(f"{base_url}/sessions answered {response.status}")
        counts = json.loads(response.read())
    return Sessions(active=counts["active"], maximum=counts["max"])


class ServerProcess:
    """An environment server in a process of its own, on a free port, for the length of a ``with`` block.

    The server reads a pipe that only its parent holds, so it stops when the parent ends, even by SIGKILL. It has a
    process group of its own: Ctrl-C in the terminal reaches the parent alone, which can close its sessions first. Needs
    a POSIX system.

    Args:
        env_id: TextArena's id of the game.
        max_concurrent_envs: How many sessions may be open at a time.
        host: Address to listen on.
        port: 0 takes a free one.
        options: Further options of ``start_sudoku_server.py``, such as ``["--clues", "70"]``.
        token: What clients must send. It reaches the server in its environment, where only this user can read it. None
            asks for nothing, whatever OPENENV_TOKEN is in this process.
        start_timeout: Seconds until it must be ready. Importing OpenEnv alone takes several.
        stop_timeout: Seconds that it gets to close its sessions before it is killed.

    Raises:
        TokenError: The token cannot be one.
    """

    def __init__(
        self,
        *,
        env_id: str = "Sudoku-v0",
        max_concurrent_envs: int = 64,
        host: str = "127.0.0.1",
        port: int = 0,
        options: Sequence[str] = (),
        token: str | None = None,
        start_timeout: float = 120.0,
        stop_timeout: float = 10.0,
    ) -> None:
        self._command = [sys.executable, str(_SCRIPT), "--exit-with-stdin", "--host", host, "--port", str(port)]
        self._command += ["--env-id", env_id, "--max-concurrent-envs", str(max_concurrent_envs), *options]
        self._token = token if token is None else checked_token(token)
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[str] | None = None
        self._output = ""
        self._base_url = ""

    @property
    def base_url(self) -> str:
        """The address, such as ``"http://127.0.0.1:40123"``; empty before `start`."""
        return self._base_url

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, for its id and exit code."""
        if self._process is None:
            raise RuntimeError("The server was not started.")
        return self._process

    @property
    def output(self) -> str:
        """What the server has printed so far."""
        if self._log is None:
            return self._output
        self._log.seek(0)
        return self._log.read()

    def count_sessions(self) -> Sessions:
        """Ask how many sessions are open."""
        return count_sessions(self._base_url, token=self._token)

    def wait_until_idle(self, *, timeout: float = 10.0) -> None:
        """Wait until no session is open: a server frees a slot a moment after the client has closed its socket.

        Raises:
            TimeoutError: Some are still open after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while active := self.count_sessions().active:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{active} sessions are still open after {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def start(self) -> ServerProcess:
        """Start the server and wait until it answers.

        Raises:
            ServerStartError: It ended, or was not ready in time.
        """
        if self._process is not None:
            raise RuntimeError("The server was started before. Make a new ServerProcess.")
        try:
            # A file, since a pipe would have to be read all the time. Its name is gone when the block ends.
            with tempfile.NamedTemporaryFile(prefix="environment-server-") as log:
                self._log = open(log.name, errors="replace")  # noqa: SIM115 - closed by stop()
                self._process = subprocess.Popen(  # noqa: S603 - our own script; no shell
                    self._command,
                    env=self._environment(),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._base_url = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != _TOKEN_VARIABLE}
        return environment if self._token is None else {**environment, _TOKEN_VARIABLE: self._token}

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if ready := _ADDRESS.search(self.output):
                with contextlib.suppress(OSError):
                    count_sessions(ready[1], timeout=max(1.0, deadline - time.monotonic()), token=self._token)
                    return ready[1]
            if ended:
                raise ServerStartError(f"The server ended with code {self.process.returncode}.", self.output)
            time.sleep(_POLL_SECONDS)
        raise ServerStartError(f"The server was not ready within {self._start_timeout:g} s.", self.output)

    def stop(self) -> int | None:
        """Close the sessions and end the process; kill it if that takes too long. Does nothing the second time.

        Returns:
            The exit code as `subprocess` tells it: 143 after a clean stop, -9 if it was killed, None if it never ran.
        """
        if self._process is None:
            return None
        try:
            self._process.terminate()
            self._process.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            pass  # it is killed now
        finally:
            self._process.kill()  # does nothing to a process that has ended
            code = self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._close_log()
        return code

    def _close_log(self) -> None:
        if self._log is not None:
            self._output = self.output
            self._log.close()
            self._log = None

    def __enter__(self) -> ServerProcess:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

"""The server that an evaluation plays on."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv_client.testing import Fault, MockEnvServer, echo
from schedulers import GYMScheduler, OpenEnvScheduler, RolloutScheduler
from schedulers.commands import names
from schedulers.commands.names import WrongUse
from schedulers.commands.servers import environment_server

FAKE = """
class ServerProcess:
    base_url = "http://127.0.0.1:9"
    calls = []
    def __init__(self, **settings):
        if settings["env_id"] == "bad":
            raise ValueError("no such token")
        self.calls.append(settings)
    def start(self):
        if self.calls[-1]["env_id"] == "broken":
            raise RuntimeError("The server ended with code 1. It printed:\\n  Traceback\\n  ImportError: x")
        self.calls.append("started")
    def stop(self):
        self.calls.append("stopped")
"""


def open_server(scheduler: type[RolloutScheduler] = OpenEnvScheduler, **given: Any) -> Any:
    options = {"serve": None, "base_url": None, "sessions": 4, "reset_kwargs": {"seed": 1}, **given}
    return environment_server(scheduler, **options)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the server scripts; returns what is done with them."""
    (tmp_path / "fake_launch.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(names, "_SERVER", "fake_launch")
    monkeypatch.delitem(sys.modules, "fake_launch", raising=False)
    monkeypatch.setenv("OPENENV_TOKEN", "t0p")
    calls: list[Any] = names.server_process().calls
    return calls


def test_running_server_is_asked_for_the_first_game() -> None:
    with MockEnvServer(echo) as server:
        with open_server(base_url=server.base_url) as address:
            assert address == server.base_url
        server.wait_until(lambda: server.sessions == 0)
        assert server.kinds[:2] == ["connect", "reset"]
        assert server.received[1].data == {"seed": 1}


def test_full_server_will_do() -> None:
    """Games wait for free sessions."""
    full = Fault("full", "connect", times=None)
    with MockEnvServer(echo, faults=[full]) as server, open_server(base_url=server.base_url) as address:
        assert address == server.base_url


def test_server_that_refuses_is_one_line() -> None:
    with (
        MockEnvServer(echo, faults=[Fault("error", "reset", times=None)]) as server,
        pytest.raises(WrongUse, match=f"^--base-url: the server answered .*{server.base_url[7:]}") as caught,
        open_server(base_url=server.base_url),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_server_is_started_with_what_the_games_need_and_stopped(calls: list[Any]) -> None:
    """Also when the games fail."""
    with contextlib.suppress(LookupError), open_server(serve="Game-v0") as address:
        assert address == "http://127.0.0.1:9"
        raise LookupError
    assert calls == [{"env_id": "Game-v0", "max_concurrent_envs": 4, "token": "t0p"}, "started", "stopped"]


def test_server_that_does_not_start_says_why_in_one_line(calls: list[Any]) -> None:
    with (
        pytest.raises(WrongUse, match=r"--serve broken: The server ended with code 1\. It printed: ImportError: x"),
        open_server(serve="broken"),
    ):
        pass
    with pytest.raises(WrongUse, match="--serve bad: no such token"), open_server(serve="bad"):
        pass


def test_scheduler_without_a_server_gets_none() -> None:
    with open_server(GYMScheduler) as address:
        assert address is None
    with pytest.raises(WrongUse, match="plays without a server"), open_server(GYMScheduler, serve="Sudoku-v0"):
        pass
    with pytest.raises(WrongUse, match="give the address of one"), open_server():
        pass

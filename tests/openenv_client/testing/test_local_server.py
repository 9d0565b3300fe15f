"""The server's life: threads, sockets, ports; tried out on the mock server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from openenv_client import ConnectError, OpenEnvError, OpenEnvWrapper, SessionLost
from openenv_client.testing import Fault, MockEnvServer

MakeWrapper = Callable[..., OpenEnvWrapper]

HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


CONNECT_FAULTS = [
    Fault("drop", "connect"),
    Fault("delay", "connect"),
    Fault("delay", "connect", 0.01),
    Fault("http", "connect"),
    Fault("full", "connect"),
    Fault("restart", "connect", 0.01),
    Fault("refuse", "connect", 0.01),
]


def address(server: MockEnvServer) -> tuple[str, int]:
    return "127.0.0.1", server._port


@pytest.fixture
def unclosed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the garbage collector found open, filled by `gc.collect`."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(str(unraisable.exc_value)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield found


# Stopping


@pytest.mark.parametrize("said", [b"", b"GET /ws HT", HANDSHAKE], ids=["nothing", "half a request", "a request"])
def test_stopping_closes_connections_that_are_in_the_handshake(unclosed: list[str], said: bytes) -> None:
    for _ in range(10):
        with MockEnvServer(faults=[Fault("delay", "connect", times=None)]) as server:
            clients = [socket.create_connection(address(server)) for _ in range(5)]
            for client in clients:
                client.sendall(said)
            if said == HANDSHAKE:
                server.wait_until(lambda server=server: len(server.received) == 5)  # type: ignore[misc]
        for client in clients:
            client.close()
        gc.collect()
    assert unclosed == []


def test_stopping_closes_a_connection_that_comes_at_that_moment(unclosed: list[str]) -> None:
    with MockEnvServer() as server, socket.socket() as client:

        def connect_as_it_stops() -> None:
            server._stopping.set()
            client.connect(address(server))  # to the kernel: the loop sees it after it has begun to stop

        server._loop.call_soon_threadsafe(connect_as_it_stops)
        server.stop()
        with contextlib.suppress(ConnectionResetError):  # it depends on who was first
            assert client.recv(1) == b""
    gc.collect()
    assert unclosed == []


@pytest.mark.parametrize("seed", range(10))
def test_stopping_leaves_neither_sockets_nor_threads_whatever_happens_to_connections(
    unclosed: list[str], seed: int
) -> None:
    chance = random.Random(seed)
    faults = [replace(chance.choice(CONNECT_FAULTS), nth=n) for n in range(1, 12) if chance.random() < 0.6]

    def play(server: MockEnvServer) -> None:
        settings: dict[str, Any] = {"connect_timeout": 0.02, "open_deadline": 0.2, "close_timeout": 0.1}
        with OpenEnvWrapper(base_url=server.base_url, **settings) as env:
            try:
                env.reset()
                env.step({})
            except OpenEnvError:
                pass

    with ThreadPoolExecutor(4) as pool:
        with MockEnvServer(faults=faults) as server:
            games = [pool.submit(play, server) for _ in range(4)]
            for game in games[: chance.choice([1, 4])]:
                game.result()
        for game in games:
            game.result()
    gc.collect()
    assert unclosed == []
    assert [thread for thread in threading.enumerate() if thread.name.startswith("MockEnvServer")] == []


def test_stopping_does_not_wait_for_what_is_held_back(make: MakeWrapper) -> None:
    with MockEnvServer() as server:
        env = make(base_url=server.base_url)
        env.reset()
        server.inject(Fault("delay", "step"))
        outcome: list[str] = []

        def play() -> None:
            try:
                env.step({})
            except SessionLost:
                outcome.append("lost")

        thread = threading.Thread(target=play)
        thread.start()
        server.wait_until(lambda: server.received[-1].kind == "step")
    thread.join()
    assert outcome == ["lost"]
    server.stop()


def test_a_frozen_server_can_be_stopped(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    with server.frozen():
        server.stop()
        with pytest.raises(SessionLost):
            env.step({})


def test_a_server_that_refuses_connections_can_be_stopped_and_started(make: MakeWrapper) -> None:
    with MockEnvServer(faults=[Fault("refuse", "connect")]) as server:
        server.restart()
        make(base_url=server.base_url).reset()


def test_a_script_may_stop_its_server(make: MakeWrapper, server: MockEnvServer) -> None:
    def crash(reset_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        server.stop()
        return []

    server.script = crash
    env = make(open_deadline=0.05)
    with pytest.raises(OpenEnvError):
        env.reset()
    server.wait_until(lambda: server.sessions == 0)


def test_several_threads_may_stop_and_restart_it(server: MockEnvServer, make: MakeWrapper) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: server.restart(), range(16)))
        make().reset()
        list(pool.map(lambda _: server.stop(), range(8)))
    assert server.sessions == 0


# Starting


def test_a_stopped_server_starts_again_on_its_port(make: MakeWrapper, server: MockEnvServer) -> None:
    url = server.base_url
    env = make(recover="never")
    env.reset()
    server.restart()
    assert (server.base_url, server.sessions) == (url, 0)
    with pytest.raises(SessionLost):
        env.step({})
    env.reset()
    with pytest.raises(RuntimeError, match="the MockEnvServer is running already"):
        server.start()


def test_a_port_that_has_been_taken_is_an_error_after_which_it_can_be_started(server: MockEnvServer) -> None:
    other = MockEnvServer()
    other._port = server._port
    with pytest.raises(OSError, match=rf"port {server._port} cannot be had again: Address already in use"):
        other.start()
    server.stop()
    with other:
        socket.create_connection(address(other)).close()


def test_what_fails_at_the_start_is_raised_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: MockEnvServer) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(MockEnvServer, "_listen", fail)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken"):
        MockEnvServer().start()
    assert threading.active_count() == before


@pytest.mark.parametrize("call", ["release", "frozen"])
def test_what_needs_a_running_server_says_so(call: str) -> None:
    server = MockEnvServer()
    with pytest.raises(RuntimeError, match="the MockEnvServer does not run in this process; start"):
        server.release() if call == "release" else server.frozen().__enter__()


def test_a_fault_that_is_given_before_the_start_counts_from_there(make: MakeWrapper) -> None:
    server = MockEnvServer()
    server.inject(Fault("refuse", "connect"))
    server.inject(Fault("http", "connect", 404))
    with server:
        with pytest.raises(ConnectError, match="refused"):
            make(base_url=server.base_url, open_deadline=0.05).reset()
        server.release()
        with pytest.raises(ConnectError, match="404"):
            make(base_url=server.base_url).reset()


def test_a_server_that_is_down_keeps_its_port(server: MockEnvServer) -> None:
    """Else another program, or the client itself by chance, could get it meanwhile."""
    server.inject(Fault("refuse", "connect"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(server))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address(server))


# Waiting


def test_a_condition_that_stays_false_says_what_arrived(server: MockEnvServer) -> None:
    with pytest.raises(AssertionError, match=r"still not true after 0\.01 s; received: \[\]"):
        server.wait_until(lambda: server.received, timeout=0.01)


async def test_a_server_does_not_need_the_callers_event_loop(server: MockEnvServer, make: MakeWrapper) -> None:
    env = make()
    await asyncio.gather(*[asyncio.to_thread(env.reset) for _ in range(4)])
    assert server.kinds.count("reset") == 4


# Forks


@pytest.fixture
def forked(server: MockEnvServer, env: OpenEnvWrapper) -> Iterator[None]:
    """A child process that stops its copy of the server and then lives on, with copies of all sockets."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads: here they are
        child = os.fork()
    if child == 0:
        try:
            with pytest.raises(RuntimeError, match="does not run in this process"):
                server.release()
            server.stop()
            os.write(writing, b"stopped")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 7) == b"stopped"
    yield
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)


@pytest.mark.usefixtures("forked")
def test_a_forked_process_does_not_disturb_the_server(env: OpenEnvWrapper) -> None:
    assert env.step({}).observation["step"] == 1


@pytest.mark.usefixtures("forked")
def test_a_connection_that_is_cut_is_cut_although_a_forked_process_has_a_copy(
    server: MockEnvServer, env: OpenEnvWrapper
) -> None:
    server.inject(Fault("drop", "step"))
    with pytest.raises(SessionLost, match="cut"):
        env.step({})


@pytest.mark.usefixtures("forked")
def test_a_stopped_server_refuses_connections_although_a_forked_process_has_a_copy(
    server: MockEnvServer, make: MakeWrapper
) -> None:
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(server))
    server.start()
    make().reset()

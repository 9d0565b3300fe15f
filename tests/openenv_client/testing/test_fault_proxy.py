from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from openenv_client import (
    ConnectError,
    EnvironmentFailedError,
    KeepaliveError,
    MessageTooBigError,
    OpenEnvError,
    OpenEnvWrapper,
    ProtocolError,
    ServerFullError,
    SessionLost,
    StepTimeoutError,
)
from openenv_client.testing import Fault, FaultProxy, MockEnvServer, Received
from tests.openenv_client.raw_server import CLOSE, Peer, RawServer, closing, frame

MakeWrapper = Callable[..., OpenEnvWrapper]

MIB = 2**20
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.fixture
def proxy(server: MockEnvServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.base_url) as proxy:
        yield proxy


@pytest.fixture
def through(make: MakeWrapper, proxy: FaultProxy) -> MakeWrapper:
    """Makes wrappers whose server is the proxy."""
    return lambda **settings: make(**{"base_url": proxy.base_url, "recover": "never", **settings})


def dial(proxy: FaultProxy, path: str = "/ws") -> ClientConnection:
    """A bare socket to the proxy, for use in a ``with`` block."""
    return connect(f"{proxy.base_url.replace('http', 'ws')}{path}", proxy=None, max_size=2**26, close_timeout=1)


def requests(received: list[Received]) -> list[Received]:
    return [event for event in received if event.kind != "connect"]


# -- what it hands on -------------------------------------------------------------------------------


def test_without_faults_an_episode_is_what_it_is_without_the_proxy(
    through: MakeWrapper, make: MakeWrapper, proxy: FaultProxy, server: MockEnvServer
) -> None:
    def play(env: OpenEnvWrapper) -> list[Any]:
        with env:
            outcome = [env.reset(seed=1), env.step({"n": 1}), env.step({"message": "ü\n\u2028"})]
            return [*outcome, env.state()["step_count"]]

    assert play(through()) == play(make())
    first, second = ([r for r in requests(server.received) if r.session == session] for session in (1, 2))
    assert [(r.kind, r.data) for r in first] == [(r.kind, r.data) for r in second]
    assert requests(proxy.forwarded) == first
    assert first[-1].kind == "close"
    server.wait_until(lambda: server.sessions == 0)
    proxy.wait_until(lambda: proxy.sessions == 0)


def test_headers_and_query_reach_the_server_and_those_of_the_handshake_are_not_repeated(
    through: MakeWrapper, proxy: FaultProxy, server: MockEnvServer
) -> None:
    through(base_url=f"{proxy.base_url}?episode=3", token="secret", headers={"X-Team": "a"}).reset()
    arrived = server.received[0].data
    assert arrived["path"] == "/ws?episode=3"
    assert (arrived["headers"]["Authorization"], arrived["headers"]["X-Team"]) == ("Bearer secret", "a")
    assert arrived["headers"]["Host"] == server.base_url.removeprefix("http://")
    assert arrived["headers"]["User-Agent"] == proxy.forwarded[0].data["headers"]["User-Agent"]


def test_a_path_prefix_of_the_server_comes_before_that_of_the_client() -> None:
    with MockEnvServer(path="/env/ws") as server, FaultProxy(server.base_url) as proxy:
        with OpenEnvWrapper(base_url=proxy.base_url) as env:
            env.reset()
        assert server.received[0].data["path"] == "/env/ws"


def test_each_client_has_a_session_of_its_own(through: MakeWrapper, proxy: FaultProxy, server: MockEnvServer) -> None:
    one, other = through(), through()
    one.reset()
    other.reset()
    assert [one.step({}).observation["step"] for _ in range(3)] == [1, 2, 3]
    assert other.step({}).observation["step"] == 1
    assert (proxy.sessions, server.sessions) == (2, 2)


def test_a_message_of_megabytes_passes_both_ways(through: MakeWrapper) -> None:
    env = through()
    env.reset()
    text = "x" * (5 * MIB)
    assert env.step({"text": text}).observation["action"] == {"text": text}


def test_the_limit_of_the_server_is_told_to_the_client(make: MakeWrapper) -> None:
    with MockEnvServer(max_message_size=1000) as server, FaultProxy(server.base_url) as proxy:
        env = make(base_url=proxy.base_url)
        env.reset()
        with pytest.raises(MessageTooBigError) as caught:
            env.step({"text": "x" * 2000})
        assert caught.value.side == "server"


def test_the_limit_of_the_client_ends_the_session_on_the_server(through: MakeWrapper, server: MockEnvServer) -> None:
    env = through(max_message_size=1000)
    env.reset()
    with pytest.raises(MessageTooBigError) as caught:
        env.step({"text": "x" * 2000})
    assert caught.value.side == "client"
    server.wait_until(lambda: server.sessions == 0)


def test_a_limit_of_its_own_ends_both_sides(make: MakeWrapper, server: MockEnvServer) -> None:
    with FaultProxy(server.base_url, max_message_size=1000) as proxy:
        env = make(base_url=proxy.base_url)
        env.reset()
        with pytest.raises(MessageTooBigError):
            env.step({"text": "x" * 2000})
        server.wait_until(lambda: server.sessions == 0)
        assert "step" not in server.kinds


def test_a_refusal_that_nobody_asked_for_passes(make: MakeWrapper) -> None:
    with MockEnvServer(capacity=0) as server, FaultProxy(server.base_url) as proxy:
        with pytest.raises(ServerFullError) as caught:
            make(base_url=proxy.base_url, capacity_timeout=0).reset()
        assert (caught.value.active, caught.value.maximum) == (0, 0)


@pytest.mark.parametrize(("path", "token", "status"), [("/ws", "secret", 401), ("/other/ws", None, 403)])
def test_a_handshake_that_the_server_refuses_is_refused_with_its_status(
    make: MakeWrapper, path: str, token: str | None, status: int
) -> None:
    with MockEnvServer(token=token) as server, FaultProxy(server.base_url) as proxy:
        with pytest.raises(ConnectError) as caught:
            make(base_url=proxy.base_url + path).reset()
        assert caught.value.status == status
        assert proxy.forwarded == []


def test_a_server_that_is_down_is_a_502_until_it_is_back(
    through: MakeWrapper, proxy: FaultProxy, server: MockEnvServer
) -> None:
    server.stop()
    with pytest.raises(InvalidStatus, match="502"), dial(proxy):
        pass
    server.start()
    through().reset()


# -- how connections end ----------------------------------------------------------------------------


def test_the_server_learns_with_which_code_the_client_closed() -> None:
    codes: list[bytes] = []

    def note_close(peer: Peer) -> None:
        peer.shake_hands()
        first, length = peer._read(2)
        assert first & 15 == CLOSE
        mask, data = peer._read(4), peer._read(length & 127)
        codes.append(bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))
        peer.send(closing(4001))

    with RawServer(note_close) as server, FaultProxy(server.base_url) as proxy:
        with dial(proxy) as client:
            client.close(4001, "enough")
        proxy.wait_until(lambda: proxy.sessions == 0)
    assert codes == [(4001).to_bytes(2, "big") + b"enough"]


@pytest.mark.parametrize(("ending", "code"), [(closing(4002, "bye"), 4002), (frame(b"", CLOSE), 1000), (b"", None)])
def test_the_client_gets_all_that_the_server_said_and_then_its_closing(ending: bytes, code: int | None) -> None:
    def speak(peer: Peer) -> None:
        peer.shake_hands()
        peer.send(frame("1") + frame("2" * MIB) + frame("3") + ending)

    with RawServer(speak) as server, FaultProxy(server.base_url) as proxy, dial(proxy) as client:
        assert [client.recv()[:1] for _ in range(3)] == ["1", "2", "3"]
        with pytest.raises(ConnectionClosed) as caught:
            client.recv()
        assert (caught.value.rcvd.code if caught.value.rcvd else None) == code


def test_a_reply_that_is_held_back_comes_before_the_closing_that_the_server_sent_after_it() -> None:
    hung_up = threading.Event()

    def answer_and_close(peer: Peer) -> None:
        peer.shake_hands()
        peer.read_request()
        peer.send(frame("the reply") + closing(4003))
        peer.drain()
        hung_up.set()

    with RawServer(answer_and_close) as server, FaultProxy(server.base_url) as proxy, dial(proxy) as client:
        proxy.inject(Fault("delay", "reset"))
        client.send('{"type":"reset","data":{}}')
        assert hung_up.wait(60)
        proxy.release()
        assert client.recv() == "the reply"
        with pytest.raises(ConnectionClosed, match="4003"):
            client.recv()


def test_a_client_that_goes_during_a_slow_handshake_leaves_no_session(proxy: FaultProxy, server: MockEnvServer) -> None:
    proxy.inject(Fault("delay", "connect"))
    with socket.create_connection(("127.0.0.1", proxy._port)) as client:
        client.sendall(HANDSHAKE)
        proxy.wait_until(lambda: proxy.sessions == 1)
    proxy.release()
    server.wait_until(lambda: server.peak_sessions == 1 and server.sessions == 0)


@pytest.mark.parametrize("how", [socket.SHUT_RDWR, socket.SHUT_WR])
def test_a_client_that_goes_without_a_goodbye_leaves_no_session(
    proxy: FaultProxy, server: MockEnvServer, how: int
) -> None:
    with dial(proxy) as client:
        client.send('{"type":"reset","data":{}}')
        client.recv()
        client.socket.shutdown(how)
        server.wait_until(lambda: server.sessions == 0)
        proxy.wait_until(lambda: proxy.sessions == 0)


def test_a_client_that_says_goodbye_and_does_not_hang_up_leaves_no_session(
    proxy: FaultProxy, server: MockEnvServer
) -> None:
    with socket.create_connection(("127.0.0.1", proxy._port)) as client:
        client.sendall(HANDSHAKE + b"\x88\x82\0\0\0\0" + (1000).to_bytes(2, "big"))
        server.wait_until(lambda: server.peak_sessions == 1 and server.sessions == 0)
        proxy.wait_until(lambda: proxy.sessions == 0)


def test_a_client_that_goes_while_the_server_takes_nothing_leaves_no_connection(
    proxy: FaultProxy, server: MockEnvServer
) -> None:
    with dial(proxy) as client:
        client.send('{"type":"reset","data":{}}')
        client.recv()
        with server.frozen():
            client.send('{"type":"step","data":{"text":"' + "x" * (15 * MIB) + '"}}')
            client.socket.shutdown(socket.SHUT_RDWR)
            proxy.wait_until(lambda: proxy.sessions == 0)
    server.wait_until(lambda: server.sessions == 0)


def test_a_server_is_held_back_while_the_client_does_not_read() -> None:
    """What a slow peer has not taken does not pile up in the proxy."""
    held_back = threading.Event()

    def flood(peer: Peer) -> None:
        peer.shake_hands()
        for number in range(100):
            if not select.select([], [peer.sock], [], 1.0)[1]:
                held_back.set()
            peer.send(frame(f"{number} " + "x" * MIB))
        peer.hold()

    with RawServer(flood) as server, FaultProxy(server.base_url) as proxy, dial(proxy) as client:
        assert held_back.wait(60)
        assert [int(str(client.recv()).split()[0]) for _ in range(100)] == list(range(100))


# -- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "applied"),
    [
        (Fault("drop", "step"), SessionLost, 0),
        (Fault("drop_after", "step"), SessionLost, 1),
        (Fault("close", "step", (1012, "bye")), SessionLost, 0),
        (Fault("restart", "step"), SessionLost, 0),
        (Fault("error", "step", "EXECUTION_ERROR"), EnvironmentFailedError, 0),
        (Fault("freeze", "step"), KeepaliveError, 0),
        (Fault("delay", "step"), StepTimeoutError, 1),
        (Fault("garbage", "step"), ProtocolError, 1),
        (Fault("send", "step", b"\0"), ProtocolError, 1),
        (Fault("wrong_type", "step", "reward"), ProtocolError, 1),
        (Fault("big", "step", 10_000), MessageTooBigError, 1),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_fault_on_a_step(
    make: MakeWrapper, server: MockEnvServer, fault: Fault, error: type[OpenEnvError], applied: int
) -> None:
    """The client sees the fault, and the server has acted on the step or has not, as the fault says; nobody is left."""
    pings = {"ping_interval": 0.05, "ping_timeout": 0.1} if fault.kind == "freeze" else {}
    with FaultProxy(server.base_url, faults=[fault]) as proxy:
        env = make(
            base_url=proxy.base_url,
            recover="never",
            max_message_size=9000,
            step_timeout=0.2 if fault.kind == "delay" else 20.0,
            **pings,
        )
        env.reset()
        with pytest.raises(error):
            env.step({"n": 1})
        assert server.actions == [{"n": 1}] * applied
        assert [r.data for r in proxy.forwarded if r.kind == "step"] == server.actions
        assert proxy.struck == {fault: 1}
        env.close()
    server.wait_until(lambda: server.sessions == 0)


def test_a_delayed_reply_arrives_when_it_is_released(through: MakeWrapper, proxy: FaultProxy) -> None:
    env = through()
    env.reset()
    proxy.inject(Fault("delay", "step"))
    outcome: list[float] = []
    thread = threading.Thread(target=lambda: outcome.append(env.step({}).reward))
    thread.start()
    proxy.wait_until(lambda: proxy.forwarded[-1].kind == "step")
    proxy.release()
    thread.join()
    assert outcome == [1.0]


def test_an_extra_message_comes_after_the_reply(proxy: FaultProxy) -> None:
    proxy.inject(Fault("extra", "reset", "again"))
    with dial(proxy) as client:
        client.send('{"type":"reset","data":{}}')
        assert "observation" in str(client.recv())
        assert client.recv() == "again"


@pytest.mark.parametrize(
    "fault",
    [Fault("http", "connect", 502), Fault("drop", "connect"), Fault("full", "connect"), Fault("delay", "connect")],
    ids=lambda fault: fault.kind,
)
def test_after_a_fault_of_the_handshake_the_next_attempt_succeeds(
    through: MakeWrapper, proxy: FaultProxy, server: MockEnvServer, fault: Fault
) -> None:
    proxy.inject(fault)
    env = through(connect_timeout=0.2 if fault.kind == "delay" else 20.0)
    assert env.reset().observation["step"] == 0
    assert proxy.struck.total() == 1
    assert [r.kind for r in proxy.forwarded] == server.kinds == ["connect", "reset"]


def test_while_connections_are_refused_sessions_go_on(through: MakeWrapper, proxy: FaultProxy) -> None:
    env = through()
    env.reset()
    proxy.inject(Fault("refuse", "connect"))
    with pytest.raises(ConnectionRefusedError), dial(proxy):
        pass
    assert env.step({}).reward == 1.0
    proxy.release()
    through().reset()


def test_a_step_whose_reply_was_lost_is_in_the_log_of_both_sessions(through: MakeWrapper, proxy: FaultProxy) -> None:
    env = through(recover="seeded")
    env.reset(seed=1)
    env.step({"n": 1})
    proxy.inject(Fault("drop_after", "step"))
    assert env.step({"n": 2}).observation["step"] == 2
    sent = [(r.session, r.data.get("n")) for r in proxy.forwarded if r.kind == "step"]
    assert sent == [(1, 1), (1, 2), (2, 1), (2, 2)]


# -- chance -----------------------------------------------------------------------------------------


def struck_steps(proxy: FaultProxy, path: str) -> list[int]:
    """Which of 100 steps meet an error, in a session of this path."""
    struck = []
    with OpenEnvWrapper(base_url=proxy.base_url + path) as env:
        env.reset()
        for number in range(100):
            try:
                env.step({})
            except EnvironmentFailedError:  # noqa: PERF203
                struck.append(number)
    return struck


def test_the_same_seed_gives_a_path_the_same_faults_in_any_order(server: MockEnvServer) -> None:
    rates = {Fault("error", "step"): 0.2, Fault("drop", "reset"): 0.0}
    with FaultProxy(server.base_url, rates=rates, seed=1) as proxy:
        a, b, a_again = (struck_steps(proxy, f"?episode={name}") for name in "aba")
    with FaultProxy(server.base_url, rates=rates, seed=1) as proxy:
        assert [struck_steps(proxy, f"?episode={name}") for name in "baa"] == [b, a, a_again]
        assert proxy.struck == {Fault("error", "step"): len(a) + len(a_again) + len(b)}
    with FaultProxy(server.base_url, rates=rates, seed=2) as proxy:
        c = struck_steps(proxy, "?episode=a")
    assert len({tuple(steps) for steps in (a, b, a_again, c)}) == 4
    assert all(5 <= len(steps) <= 40 for steps in (a, b, a_again, c))


@pytest.mark.parametrize(
    ("rates", "complaint"),
    [
        ({Fault("drop", "step"): -0.1}, "-0.1. Give a finite number of 0 or more"),
        ({Fault("drop", "step"): "often"}, "'often'. Give a finite number of 0 or more"),
        ({Fault("drop", "step"): 1.5}, "sum to 1 at most"),
        ({Fault("drop", "step"): 0.6, Fault("drop_after", "step"): 0.6}, "sum to 1 at most"),
        ({Fault("refuse", "connect"): 0.1}, "cannot be refused by chance"),
    ],
)
def test_rates_that_are_none_are_refused(rates: dict[Fault, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        FaultProxy("http://127.0.0.1:1", rates=rates)


def test_rates_are_by_fault() -> None:
    rates: Any = {"drop": 0.1}
    with pytest.raises(TypeError, match="rates has 'drop'; give a rate by Fault"):
        FaultProxy("http://127.0.0.1:1", rates=rates)


def test_a_server_address_with_a_query_is_refused() -> None:
    with pytest.raises(ValueError, match="has the query 'a=b'"):
        FaultProxy("http://127.0.0.1:1?a=b")


# -- life -------------------------------------------------------------------------------------------


def test_what_is_taken_leaves_the_log(through: MakeWrapper, proxy: FaultProxy) -> None:
    for number in (1, 2, 1):
        with through(base_url=f"{proxy.base_url}?episode={number}") as env:
            env.reset(n=number)
    taken = proxy.take("/ws?episode=1")
    assert [(r.session, r.kind) for r in taken if r.kind != "close"] == [
        (1, "connect"),
        (1, "reset"),
        (3, "connect"),
        (3, "reset"),
    ]
    assert {r.session for r in proxy.forwarded} == {2}


def test_stopping_leaves_no_thread_and_no_socket_whatever_is_under_way(server: MockEnvServer) -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    faults = [Fault("delay", "connect", nth=5), Fault("freeze", "step"), Fault("delay", "step", nth=2)]

    def dial_in_vain() -> None:
        with contextlib.suppress(OSError, InvalidHandshake), dial(stopping):
            pass

    with contextlib.ExitStack() as clients:
        with FaultProxy(server.base_url, faults=faults) as stopping:
            for step in (True, True, True, False):  # frozen, delayed, answered; the last only resets
                client = clients.enter_context(dial(stopping))
                client.send('{"type":"reset","data":{}}')
                client.recv()
                if step:
                    client.send('{"type":"step","data":{}}')
            clients.enter_context(socket.create_connection(("127.0.0.1", stopping._port)))  # does not say a word
            slow = threading.Thread(target=dial_in_vain)
            slow.start()
            stopping.wait_until(lambda: stopping.sessions == 5 and stopping.struck.total() == 3)
        slow.join()
        server.wait_until(lambda: server.sessions == 0)
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)


def test_it_starts_again_on_its_port(through: MakeWrapper, proxy: FaultProxy) -> None:
    address = proxy.base_url
    env = through(recover="seeded")
    env.reset(seed=1)
    proxy.restart()
    assert proxy.base_url == address
    assert env.step({}).reward == 1.0

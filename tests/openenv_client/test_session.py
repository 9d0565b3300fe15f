from __future__ import annotations

import contextlib
import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_client.errors import (
    ConnectError,
    KeepaliveError,
    MessageTooBigError,
    OpenEnvError,
    ProtocolError,
    ServerFullError,
    SessionAbortedError,
    SessionFailedError,
    SessionLost,
    StepTimeoutError,
)
from openenv_client.protocol import Observation, encode_reset, encode_step, parse_observation, websocket_url
from openenv_client.session import Deadline, Session, SessionSettings
from openenv_client.testing import Fault, MockEnvServer
from tests.openenv_client.raw_server import CONTINUATION, PING, Peer, RawServer, frame, observation

MakeSession = Callable[..., Session]


@pytest.fixture
def make_session(server: MockEnvServer) -> Iterator[MakeSession]:
    """Makes connected sessions that are closed at the end."""
    sessions: list[Session] = []

    def make(**settings: float) -> Session:
        session = Session(websocket_url(server.base_url), SessionSettings(**{"close_timeout": 0.2, **settings}))  # type: ignore[arg-type]
        session.connect(Deadline(10))
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()


def reset(session: Session, seconds: float = 10) -> Observation:
    return session.exchange("reset", encode_reset({}), parse_observation, Deadline(seconds))


def step(session: Session, text: str = "", seconds: float = 10) -> Observation:
    return session.exchange("step", encode_step({"text": text}), parse_observation, Deadline(seconds))


def wait_until_the_end_has_arrived(session: Session) -> None:
    connection = session._connection
    assert connection is not None
    connection.recv_events_thread.join()


def test_a_deadline_is_spent_over_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    deadline = Deadline(10)
    now[0] += 4
    part = deadline.at_most(60)
    assert (deadline.elapsed(), deadline.remaining(), part.seconds) == (4, 6, 6)
    assert deadline.at_most(2).seconds == 2
    now[0] += 7
    assert (deadline.remaining(), part.remaining(), deadline.at_most(60).seconds) == (0, 0, 0)


def test_a_refusal_that_arrived_with_the_close_is_read_before_anything_is_sent(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """S01: the server closes before the first request; what it said is the reason, not the closed socket."""
    server.inject(Fault("full", "connect"))
    session = make_session()
    wait_until_the_end_has_arrived(session)

    with pytest.raises(ServerFullError) as caught:
        reset(session)
    assert not caught.value.maybe_applied


def test_a_refusal_that_arrives_while_the_request_is_sent_is_read(
    server: MockEnvServer, make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S01: the send fails and the buffered frame says why."""
    server.inject(Fault("full", "connect"))
    session = make_session()
    connection = session._connection
    assert connection is not None
    send = connection.send

    def late_send(text: str) -> None:
        wait_until_the_end_has_arrived(session)
        send(text)

    looks = iter([TimeoutError])
    recv = connection.recv

    def recv_nothing_at_first(timeout: float | None = None) -> str | bytes:
        for error in looks:
            raise error
        return recv(timeout)

    monkeypatch.setattr(connection, "send", late_send)
    monkeypatch.setattr(connection, "recv", recv_nothing_at_first)

    with pytest.raises(ServerFullError):
        reset(session)


def test_a_message_that_nobody_asked_for_is_not_the_next_answer(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """W01: a second reply to one request would shift all that follow."""
    session = make_session()
    reset(session)
    stale = '{"type":"observation","data":{"observation":{"stale":true},"reward":1.0}}'
    server.inject(Fault("extra", "step", stale))
    step(session)

    with pytest.raises(ProtocolError, match="without a request") as caught:
        step(session)  # at once: the message may still be under way
    assert not caught.value.maybe_applied
    with pytest.raises(SessionLost, match="without a request"):
        step(session)


def test_a_session_may_be_idle_for_longer_than_a_request_may_take(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """The time of a request is not left behind on the socket, where the thread that reads would obey it."""
    session = make_session(ping_interval=None)
    reset(session, seconds=0.3)
    connection = session._connection
    assert connection is not None
    connection.recv_events_thread.join(0.6)
    assert session.alive
    assert step(session).observation["step"] == 1


def test_a_late_reply_is_never_read(server: MockEnvServer, make_session: MakeSession) -> None:
    """W01."""
    session = make_session()
    reset(session)
    server.inject(Fault("delay", "step"))

    with pytest.raises(StepTimeoutError, match=r"no reply to step within 0\.05 s") as caught:
        step(session, "A", seconds=0.05)
    server.release()

    assert caught.value.timeout == 0.05
    assert caught.value.maybe_applied
    assert not session.alive
    with pytest.raises(SessionLost, match="the session is gone: no reply to step") as second:
        step(session, "B")
    assert not second.value.maybe_applied
    assert [event.data for event in server.received if event.kind == "step"] == [{"text": "A"}]


def test_an_interrupted_request_leaves_no_reply_behind(make_session: MakeSession) -> None:
    """Ctrl-C in a notebook, then the next cell."""
    session = make_session()

    def interrupt(_: str | bytes) -> Observation:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.exchange("reset", encode_reset({}), interrupt, Deadline(10))
    with pytest.raises(SessionLost, match="interrupted by KeyboardInterrupt"):
        step(session)


def test_a_request_that_a_frozen_server_does_not_read_times_out(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """The deadline covers sending: the buffers of the kernel fill up and the send itself blocks."""
    session = make_session()
    reset(session)

    with server.frozen(), pytest.raises(StepTimeoutError):
        step(session, "x" * 15_000_000, seconds=0.1)


def test_an_abort_ends_a_send_that_blocks(server: MockEnvServer, make_session: MakeSession) -> None:
    """W13."""
    session = make_session()
    reset(session)
    caught: list[OpenEnvError] = []

    def play() -> None:
        try:
            step(session, "x" * 15_000_000)
        except OpenEnvError as error:
            caught.append(error)

    with server.frozen():
        thread = threading.Thread(target=play)
        thread.start()
        session.abort()
        thread.join()
    assert [type(error) for error in caught] in ([SessionAbortedError], [SessionLost])


def test_an_aborted_session_sends_nothing_more(server: MockEnvServer, make_session: MakeSession) -> None:
    session = make_session()
    reset(session)
    session.abort()

    with pytest.raises(SessionLost, match="the session is gone: it was aborted") as caught:
        step(session)
    assert not caught.value.maybe_applied
    assert [event.kind for event in server.received] == ["connect", "reset"]


def test_a_session_that_is_aborted_before_it_is_open_never_opens(server: MockEnvServer) -> None:
    session = Session(websocket_url(server.base_url), SessionSettings())
    session.abort()

    with pytest.raises(SessionAbortedError):
        session.connect(Deadline(10))
    with pytest.raises(SessionLost):
        reset(session)
    session.close()


def test_a_server_that_answers_no_pings_is_noticed(server: MockEnvServer, make_session: MakeSession) -> None:
    """W05, W06, W15."""
    session = make_session(ping_interval=0.02, ping_timeout=0.02)
    reset(session)

    with (
        server.frozen(),
        pytest.raises(KeepaliveError, match=r"closed by keepalive .* the client got no answer") as caught,
    ):
        step(session)
    assert caught.value.close_code == 1011


def test_a_reply_over_the_limit_names_the_limit_and_the_side(server: MockEnvServer, make_session: MakeSession) -> None:
    """W07, W08: no retry, no network failure; the limit is ours, finite and a setting."""
    session = make_session(max_message_size=1000)
    reset(session)
    server.inject(Fault("big", "step", 1001))

    with pytest.raises(MessageTooBigError, match="max_message_size=1000") as caught:
        step(session)
    assert (caught.value.side, caught.value.limit, caught.value.maybe_applied) == ("client", 1000, True)


def test_a_megabyte_is_no_limit(server: MockEnvServer, make_session: MakeSession) -> None:
    """W07."""
    session = make_session()
    reset(session)
    server.inject(Fault("big", "step", 2**20 + 10))

    assert len(step(session).observation["padding"]) == 2**20 + 10
    assert step(session, "x" * 1_100_000).observation["step"] == 2


def test_a_request_over_the_servers_limit_says_that_it_is_the_servers() -> None:
    """W07."""
    with MockEnvServer(max_message_size=1000) as server:
        session = Session(websocket_url(server.base_url), SessionSettings())
        session.connect(Deadline(10))
        reset(session)

        with pytest.raises(MessageTooBigError, match="the server refused step as too big: it has about 20") as caught:
            step(session, "x" * 2000)
        assert (caught.value.side, caught.value.limit, caught.value.close_code) == ("server", 1000, 1009)
        assert "--ws-max-size" in str(caught.value)


def test_keepalive_does_not_touch_the_random_state_of_the_program(make_session: MakeSession) -> None:
    connection = make_session()._connection
    assert connection is not None
    state = random.getstate()
    connection.ping().wait()
    assert random.getstate() == state


def test_close_tells_the_server_and_waits_until_the_slot_is_free(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    session = make_session()
    reset(session)
    session.close()

    assert server.sessions == 0
    assert [event.kind for event in server.received] == ["connect", "reset", "close"]
    session.close()


def test_a_frozen_server_does_not_hold_a_close(server: MockEnvServer, make_session: MakeSession) -> None:
    """W13, S07: the last result is there, then the server stalls."""
    sessions = [make_session(close_timeout=0.02) for _ in range(8)]
    for session in sessions:
        reset(session)

    with server.frozen():
        for session in sessions:
            session.close()
        assert server.sessions == len(sessions)
    server.wait_until(lambda: server.sessions == 0)


def test_a_message_that_nobody_asked_for_does_not_disturb_a_close(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """S07: also when the server has gone after it."""
    session = make_session()
    server.inject(Fault("extra", "reset", '{"type":"state","data":{}}'))
    server.inject(Fault("close", "step", 1001))
    reset(session)
    connection = session._connection
    assert connection is not None
    connection.send(encode_step({}))
    wait_until_the_end_has_arrived(session)
    session.close()
    assert not session.alive


def test_a_closed_session_leaves_no_thread_and_no_socket(server: MockEnvServer, make_session: MakeSession) -> None:
    session = make_session()
    connection = session._connection
    assert connection is not None
    keepalive = connection.keepalive_thread
    assert keepalive is not None
    session.close()
    keepalive.join()

    assert not connection.recv_events_thread.is_alive()
    assert connection.socket.fileno() == -1


# Connecting


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Look-ups of names find nothing until this event is set."""
    known, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
        known.wait()
        return real(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield known
    known.set()


def connecting(session: Session, seconds: float) -> tuple[threading.Thread, list[OpenEnvError]]:
    errors: list[OpenEnvError] = []

    def connect() -> None:
        try:
            session.connect(Deadline(seconds))
        except OpenEnvError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    return thread, errors


def test_the_look_up_of_a_name_does_not_hold_connecting(server: MockEnvServer, names: threading.Event) -> None:
    """What comes of it later is shut at once."""
    session = Session(websocket_url(server.base_url), SessionSettings())
    before = set(threading.enumerate())
    with pytest.raises(ConnectError, match=r"no connection within 0\.05 s") as caught:
        session.connect(Deadline(0.05))
    names.set()

    assert caught.value.transient
    for thread in set(threading.enumerate()) - before:
        thread.join()
    server.wait_until(lambda: server.sessions == 0)
    assert not session.alive
    session.close()


def test_an_abort_ends_the_wait_for_a_name_at_once(server: MockEnvServer, names: threading.Event) -> None:
    """W13."""
    session = Session(websocket_url(server.base_url), SessionSettings())
    thread, errors = connecting(session, 1e300)
    session.abort()
    thread.join()
    assert [type(error) for error in errors] == [SessionAbortedError]


def test_an_interrupt_while_connecting_leaves_nothing_behind(
    server: MockEnvServer, names: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook."""
    session = Session(websocket_url(server.base_url), SessionSettings())

    def interrupt(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(session._settled, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.connect(Deadline(10))
    names.set()
    server.wait_until(lambda: server.sessions == 0)
    with pytest.raises(SessionLost, match="the session is gone: connecting was interrupted by KeyboardInterrupt"):
        reset(session)


def test_an_unknown_failure_of_connecting_is_an_error_of_ours(
    server: MockEnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("openenv_client.session.connect", fail)
    with pytest.raises(ConnectError, match="can't start new thread"):
        Session(websocket_url(server.base_url), SessionSettings()).connect(Deadline(10))


def test_a_redirect_is_not_followed_with_the_headers_of_the_caller(server: MockEnvServer) -> None:
    """A token must not go to a host that nobody named."""

    def redirect(peer: Peer) -> None:
        peer.read_head()
        peer.send(f"HTTP/1.1 302 Found\r\nLocation: {server.base_url}/ws\r\nContent-Length: 0\r\n\r\n".encode())
        peer.drain()

    with RawServer(redirect) as elsewhere:
        settings = SessionSettings(headers={"Authorization": "Bearer hunter2"})
        with pytest.raises(ConnectError, match="302"):
            Session(websocket_url(elsewhere.base_url), settings).connect(Deadline(10))
    assert server.received == []


def test_no_level_of_logging_shows_the_handshake(server: MockEnvServer, caplog: pytest.LogCaptureFixture) -> None:
    """A header or the query may hold a token."""
    caplog.set_level(logging.DEBUG, "openenv_client.websockets")
    session = Session(
        websocket_url(server.base_url + "?token=hunter2"), SessionSettings(headers={"Authorization": "Bearer hunter2"})
    )
    session.connect(Deadline(10))
    reset(session)
    session.close()

    logged = "\n".join(record.getMessage() for record in caplog.records if record.name == "openenv_client.websockets")
    assert "hunter2" not in logged
    assert "> TEXT" in logged  # what is no secret is there for those who look for it


# What a hostile or a broken server may do


def test_a_server_that_pings_and_does_not_read_cannot_hold_a_request() -> None:
    """The thread that answers the pings blocks in writing, for ever, and holds the lock that a send needs."""
    idle, blocked = threading.Event(), threading.Event()

    def ping(peer: Peer) -> None:
        peer.play(steps=1)
        idle.wait()
        peer.sock.settimeout(1)
        with contextlib.suppress(TimeoutError):  # the client has stopped reading as well
            while True:
                peer.send(frame(b"x" * 125, PING) * 100)
        blocked.set()
        peer.hold()

    with RawServer(ping) as server:
        session = Session(websocket_url(server.base_url), SessionSettings(close_timeout=0.1))
        session.connect(Deadline(10))
        connection = session._connection
        assert connection is not None
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reset(session)
        step(session)
        idle.set()
        assert blocked.wait(60)
        with pytest.raises(StepTimeoutError):
            step(session, seconds=0.1)


@pytest.fixture
def tls(monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """TLS of a server that the client trusts."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    monkeypatch.setattr(ssl, "create_default_context", lambda: client_context)
    return context


def test_a_slow_reader_cannot_stretch_a_deadline_over_tls(tls: ssl.SSLContext) -> None:
    """The time is one for all records of a request, not for each."""
    read: list[int] = []

    def read_slowly(peer: Peer) -> None:
        peer.play(steps=1)
        while not peer.stopping.wait(0.01):
            read.append(len(peer.sock.recv(2**14)))

    with RawServer(read_slowly, tls=tls) as server:
        session = Session(websocket_url(server.base_url), SessionSettings())
        session.connect(Deadline(10))
        reset(session)
        step(session)
        with pytest.raises(StepTimeoutError):
            step(session, "x" * 10_000_000, seconds=0.5)
    assert sum(read) < 10_000_000


def test_only_the_thread_that_reads_closes_a_socket(tls: ssl.SSLContext) -> None:
    """Closed under a thread that is in the middle of reading TLS, it would read on from another connection's."""
    closed_by: list[threading.Thread] = []

    def say_nothing(peer: Peer) -> None:
        peer.play(steps=1)
        peer.drain()

    with RawServer(say_nothing, tls=tls) as server:
        session = Session(websocket_url(server.base_url), SessionSettings())
        session.connect(Deadline(10))
        connection = session._connection
        assert connection is not None
        close = connection.socket.close

        def record() -> None:
            closed_by.append(threading.current_thread())
            close()

        connection.socket.close = record  # type: ignore[method-assign]
        reset(session)
        step(session)
        with pytest.raises(StepTimeoutError):
            step(session, seconds=0.1)
        assert set(closed_by) == {connection.recv_events_thread}
        assert connection.socket.fileno() == -1


def test_a_reply_in_thousands_of_pieces_is_none() -> None:
    """Newer versions of websockets stop at some thousand, with the close code of a message that is too big."""

    def crumble(peer: Peer) -> None:
        peer.play(steps=1)
        peer.read_request()
        peer.send(frame("{", fin=False) + frame(" ", CONTINUATION, fin=False) * 5000 + frame("", CONTINUATION))
        peer.drain()

    with RawServer(crumble) as crumbling:
        session = Session(websocket_url(crumbling.base_url), SessionSettings())
        session.connect(Deadline(10))
        reset(session)
        step(session)
        with pytest.raises(ProtocolError):
            step(session)


def test_a_server_that_never_stops_talking_does_not_hold_a_close() -> None:
    def talk(peer: Peer) -> None:
        peer.play(steps=0)
        peer.read_request()
        while True:
            peer.send(frame(observation(late=True)) * 100)

    with RawServer(talk) as server:
        session = Session(websocket_url(server.base_url), SessionSettings(close_timeout=0.1))
        session.connect(Deadline(10))
        reset(session)
        session.close()
        assert not session.alive


def test_a_close_waits_for_the_end_also_when_a_late_reply_comes_first(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """The slot is free when close returns."""
    session = make_session(close_timeout=10)
    server.inject(Fault("extra", "reset", observation(late=True)))
    server.inject(Fault("delay", "close", 0.05))
    reset(session)
    session.close()
    assert server.sessions == 0


def test_a_server_that_is_full_in_the_middle_of_a_session_has_ended_it(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """Nobody waits for a free session because of this: the game is lost."""
    session = make_session()
    reset(session)
    server.inject(Fault("error", "step", "CAPACITY_REACHED"))
    with pytest.raises(SessionFailedError, match="ended a running session: the server is full") as caught:
        step(session)
    assert (caught.value.code, caught.value.maybe_applied) == ("CAPACITY_REACHED", True)


def test_times_that_no_timer_takes_are_times_without_end(make_session: MakeSession) -> None:
    session = make_session(close_timeout=1e300, ping_timeout=1e300)
    assert reset(session, seconds=1e300).observation["step"] == 0
    session.close()


opcodes = st.sampled_from([0, 1, 1, 1, 2, 3, 8, 9, 10])
payloads = st.binary(max_size=130) | st.sampled_from(
    [observation(n=1).encode(), b'{"type":"error","data":{}}', b"\x03\xe8"]
)
wire = st.lists(
    st.binary(max_size=40)
    | st.builds(frame, payloads, opcodes)
    | st.builds(frame, payloads, opcodes, fin=st.booleans(), rsv1=st.booleans()),
    max_size=4,
).map(b"".join)


@pytest.fixture(scope="module")
def babbler() -> Iterator[tuple[str, list[tuple[bytes, bytes, bytes]]]]:
    """A server that sends bytes instead of a handshake, after it, and in answer to a request; then it hangs up."""
    said: list[tuple[bytes, bytes, bytes]] = []

    def babble(peer: Peer) -> None:
        instead, after, answer = said[-1]
        if instead:
            peer.read_head()
            peer.send(instead)
        else:
            peer.shake_hands()
            peer.send(after)
            peer.read_request()
            peer.send(answer)

    with RawServer(babble, then=babble) as server:
        yield server.base_url, said


@settings(max_examples=300, deadline=None)
@given(
    instead=st.just(b"") | wire | st.binary(max_size=40).map(b"HTTP/1.1 ".__add__),
    after=st.just(b"") | wire,
    answer=wire,
)
def test_whatever_bytes_a_server_sends_only_our_errors_come_of_it(
    babbler: tuple[str, list[tuple[bytes, bytes, bytes]]], instead: bytes, after: bytes, answer: bytes
) -> None:
    base_url, said = babbler
    said.append((instead, after, answer))
    session = Session(websocket_url(base_url), SessionSettings())
    with contextlib.suppress(OpenEnvError):
        session.connect(Deadline(30))
        reset(session, 30)
        step(session, "", 30)
    session.close()
    assert not session.alive

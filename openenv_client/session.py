"""One socket is one environment session, with at most one request in flight."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from websockets.exceptions import (
    ConnectionClosed,
    InvalidMessage,
    InvalidProxy,
    InvalidProxyMessage,
    InvalidProxyStatus,
    InvalidStatus,
    InvalidURI,
)
from websockets.http11 import Response
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from . import protocol
from .errors import (
    ConfigurationError,
    ConnectError,
    EnvironmentFailedError,
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

if TYPE_CHECKING:
    from websockets.typing import DataLike

__all__ = ["Deadline", "Session", "SessionSettings"]

T = TypeVar("T")

# Whatever ends a connection is raised as one of our errors. websockets logs it too, with a traceback: for those who set
# this logger to a lower level.
_websockets_logger = logging.getLogger("openenv_client.websockets")
_websockets_logger.setLevel(logging.CRITICAL)
# At DEBUG that would be the handshake as well, whose address and headers may hold a token.
_websockets_logger.addFilter(lambda record: not str(record.msg).startswith(("> GET", "> %s:")))

_TOO_BIG = 1009
_INTERNAL_ERROR = 1011
_REFUSALS = (1002, 1003, 1007, 1008)  # of what was sent, or of who sent it: another attempt would meet them again

_LONGEST = 1e8  # seconds, three years

_ADDRESSES = "Correct base_url or the proxy variables (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY)."
_NO_TLS = "Check that the server runs and speaks TLS; if it does not, give http://."
_CERTIFICATE = (
    "Give the host name for which it was made, or let SSL_CERT_FILE name the authority that signed it; "
    "an expired one must be renewed."
)


class Deadline:
    """An amount of time that is spent over several waits.

    Args:
        seconds: How much there is.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Seconds left: 0 at least, and no more than the timers of the system take."""
        return min(max(0.0, self.seconds - self.elapsed()), _LONGEST)

    def at_most(self, seconds: float) -> Deadline:
        """A deadline for one part: so many seconds from now, or what is left of this one if that is less."""
        return Deadline(min(seconds, self.remaining()))


@dataclass(frozen=True)
class SessionSettings:
    """How a session uses its socket. Times are in seconds, sizes in bytes."""

    close_timeout: float = 1.0
    max_message_size: int = 64 * 2**20
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a token
    ping_interval: float | None = 20.0
    ping_timeout: float | None = 60.0


class _Connection(ClientConnection):
    def handshake(self, *args: Any, **kwargs: Any) -> None:
        try:
            try:
                super().handshake(*args, **kwargs)
            except ConnectionClosed:
                # A server that speaks first may have ended the handshake before our request was out.
                if self.protocol.handshake_exc is None:
                    raise
                raise self.protocol.handshake_exc  # noqa: B904 - it has a cause
        except InvalidStatus as exc:
            # Before websockets sees it: newer versions follow a redirect, with the headers, wherever it leads.
            raise _status_error(exc.response, "server") from exc

    def send_data(self) -> None:
        super().send_data()
        # Once either side has said that it is over, nothing more can come. websockets would wait until the other side
        # hangs up, and a frozen one never does.
        if self.protocol.state is State.CLOSING:
            _shut(self)

    def close_socket(self) -> None:
        # Only the thread that reads may close the socket, and only while nobody writes. In the middle of reading or
        # writing OpenSSL would go on with the number of the descriptor, which may be another connection's by then.
        _shut(self)
        if threading.current_thread() is self.recv_events_thread:
            with self.protocol_mutex:
                self.socket.close()
            super().close_socket()
        else:
            self.recv_messages.close()  # should it wait for room there
            self.recv_events_thread.join()

    def ping(self, data: DataLike | None = None, *, ack_on_close: bool = False) -> threading.Event:
        # The payload that websockets would choose comes from the global random generator. Training code seeds that one
        # and counts on its sequence, which a keepalive thread must not disturb.
        return super().ping(os.urandom(8) if data is None else data, ack_on_close=ack_on_close)


class Session:
    """A WebSocket to an environment server.

    Any failure but an error reply ends the session for good: the socket is shut before the error is raised, so that a
    reply that comes late is never read. `abort` may be called from any thread; the caller serialises the rest.

    Args:
        url: Address of the WebSocket endpoint.
        settings: How to use the socket.
    """

    def __init__(self, url: str, settings: SessionSettings) -> None:
        self._url = url
        self._settings = settings
        self._connection: ClientConnection | None = None
        self._settled = threading.Event()  # connecting has come to an end
        self._answered = False
        self._quiet: threading.Event | None = None  # set when all that the server sent behind its last reply is here
        self._aborted = False
        self._lost_because: str | None = None
        self._pid = os.getpid()

    @property
    def alive(self) -> bool:
        """Whether a request may succeed, as far as is known without asking."""
        connection = self._connection
        return connection is not None and not self._aborted and connection.state is State.OPEN

    def connect(self, deadline: Deadline) -> None:
        """Open the socket and shake hands.

        Raises:
            ConnectError: That failed.
            ConfigurationError: The address or the proxy's is unusable.
            SessionAbortedError: `abort` was called.
        """
        failures: list[Exception] = []

        def open_connection() -> None:
            try:
                self._open(deadline.remaining())
            except Exception as exc:  # noqa: BLE001 - it is raised where the caller waits
                failures.append(exc)
            finally:
                self._settled.set()

        # In a thread of its own, so that the deadline and `abort` end the wait whatever it is for: the look-up of a
        # name cannot be interrupted, and each address of a name would get the whole time.
        threading.Thread(target=open_connection, name="openenv-connect", daemon=True).start()
        try:
            if not self._settled.wait(deadline.remaining()):
                failures.append(TimeoutError())
            if not failures and not self._aborted:
                return
        except BaseException as exc:  # Ctrl-C
            self._give_up(f"connecting was interrupted by {type(exc).__name__}")
            raise
        error = _aborted() if self._aborted else _connect_error(failures[0], deadline)
        self._give_up(error.message)
        # The cause of a bad proxy address would show its password.
        hidden = isinstance(error, (SessionAbortedError, ConfigurationError))
        raise self._describe(error, deadline) from (None if hidden else error.__cause__ or failures[0])

    def _open(self, timeout: float) -> None:
        settings = self._settings
        # Entering the context is the form whose meaning stays the same in all versions of websockets; leaving it does
        # no more than `close`, which is ours to call.
        connect(
            self._url,
            additional_headers=dict(settings.headers),
            # A proxy cannot reach this machine's loopback; websockets would ask it all the same.
            proxy=None if protocol.is_loopback(self._url) else True,
            compression=None,  # costs more than it saves on messages of a few kilobytes
            open_timeout=timeout,
            ping_interval=settings.ping_interval,
            ping_timeout=settings.ping_timeout,
            close_timeout=min(settings.close_timeout, _LONGEST),
            max_size=settings.max_message_size,
            logger=_websockets_logger,
            create_connection=cast("type[ClientConnection]", self._register),
        ).__enter__()

    def _register(self, *args: Any, **kwargs: Any) -> ClientConnection:
        # Known before the handshake, so that `abort` can end the wait for it.
        self._connection = connection = _Connection(*args, **kwargs)
        if self._aborted:
            self._give_up("it was aborted")
        return connection

    def _give_up(self, reason: str) -> None:
        """Let go of a connection that is not or not yet open; should it still open, it is shut in the same moment."""
        self._lost_because = self._lost_because or reason
        self.abort()
        self._connection = None  # websockets closes it

    def exchange(self, operation: str, request: str, parse: Callable[[str | bytes], T], deadline: Deadline) -> T:
        """Send a request and read its reply.

        Args:
            operation: Name of the request for messages.
            request: What to send.
            parse: Makes the result of the reply or raises.
            deadline: Time for both.

        Raises:
            EnvironmentFailedError: The server answered with an error; the session goes on.
            OpenEnvError: Any other; the session is over.
        """
        connection = self._connection
        if connection is None or self._lost_because is not None:
            raise self._describe(SessionLost(f"the session is gone: {self._lost_because}", transient=False), deadline)
        sent = False
        try:
            with _shut_at(deadline, connection):
                self._await_quiet(deadline)
                _refuse_unasked(connection)
                sent = True
                _send(connection, request)
                reply = self._receive(connection, deadline)
                with contextlib.suppress(ConnectionClosed):  # the reply stands; the next request will see it
                    self._quiet = connection.ping(ack_on_close=True)
            result = parse(reply)
        except EnvironmentFailedError as error:
            self._answered = True
            self._describe(error, deadline)
            raise
        except OpenEnvError as error:
            lost, cause = self._in_order(error), error.__cause__
        except (ConnectionClosed, OSError) as exc:  # TimeoutError is an OSError
            lost, cause = self._classify(exc, operation, len(request), deadline), exc
        except BaseException as exc:
            # Ctrl-C in a notebook: the reply is still to come and must not become the answer to another request.
            self._kill(f"{operation} was interrupted by {type(exc).__name__}")
            raise
        else:
            self._answered = True
            return result
        lost.maybe_applied = sent and not isinstance(lost, ServerFullError)
        self._kill(lost.message)
        raise self._describe(lost, deadline) from cause

    def _await_quiet(self, deadline: Deadline) -> None:
        # Replies have no ids: one too many would be taken for the answer to the next request. But it comes before the
        # answer to the ping that was sent behind the reply, for which only those have to wait who ask again at once.
        if self._quiet is not None and not self._quiet.wait(deadline.remaining()):
            raise TimeoutError

    def _receive(self, connection: ClientConnection, deadline: Deadline) -> str | bytes:
        reply = connection.recv(timeout=deadline.remaining())
        if self._aborted:  # between the reply's arrival and now
            raise _aborted()
        return reply

    def _in_order(self, error: OpenEnvError) -> OpenEnvError:
        if self._answered and isinstance(error, ServerFullError):
            # Whoever waits for a free session because of this would have lost the one that there was.
            return SessionFailedError(f"the server ended a running session: {error.message}", code=error.code)
        return error

    def _classify(self, exc: Exception, operation: str, size: int, deadline: Deadline) -> OpenEnvError:
        if self._aborted:
            return _aborted()
        if isinstance(exc, ConnectionClosed):
            # Out of time arrives as this, too: from a connection that was shut without a close frame.
            if deadline.remaining() or not exc.sent is exc.rcvd is None:
                return _closed_error(exc, operation, size, self._settings)
        elif not isinstance(exc, TimeoutError):
            return SessionLost(f"the connection broke during {operation}: {_reason(exc)}")
        return StepTimeoutError(f"no reply to {operation} within {deadline.seconds:g} s", timeout=deadline.seconds)

    def _describe(self, error: OpenEnvError, deadline: Deadline) -> OpenEnvError:
        error.url = protocol.public_url(self._url)
        error.elapsed = deadline.elapsed()
        return error

    def abort(self) -> None:
        """End the session at once, from any thread, without waiting; a request under way raises SessionAbortedError."""
        self._aborted = True
        self._lost_because = self._lost_because or "it was aborted"
        self._settled.set()
        if self._connection is not None and os.getpid() == self._pid:
            _shut(self._connection)

    def _kill(self, reason: str) -> None:
        self._lost_because = self._lost_because or reason
        if self._connection is not None:
            _shut(self._connection)
            self._connection.close()  # immediate, since the socket is shut; frees the threads and the descriptor

    def close(self) -> None:
        """Say goodbye, wait until the server has ended the session or `close_timeout` is over, and close the socket."""
        connection = self._connection
        if connection is None:
            return
        if os.getpid() != self._pid:
            connection.socket.close()  # our copy of the descriptor alone: the session goes on in the parent
            return
        deadline = Deadline(self._settings.close_timeout)
        try:
            with _shut_at(deadline, connection):
                # The server frees the slot before it closes the socket, so after a proper goodbye the slot is free.
                _send(connection, protocol.CLOSE)
                while deadline.remaining():
                    connection.recv(timeout=deadline.remaining())  # a late reply, until the connection ends
        except (ConnectionClosed, OSError, OpenEnvError):
            pass  # closed as asked, lost, frozen, or out of step: in each case all that is left is to close our end
        finally:  # also after another Ctrl-C
            self._kill("it was closed")


@contextlib.contextmanager
def _shut_at(deadline: Deadline, connection: ClientConnection) -> Iterator[None]:
    """Shut the connection when the time is over, which ends whatever a thread waits for there."""
    # The buffers of a peer that does not read fill up, and writing then blocks for ever. To the thread that answers
    # pings that may have happened already, and it holds the lock that a send needs. A timeout on the socket would not
    # help there, and older versions of websockets would obey it in the long wait for the next message, too.
    timer = threading.Timer(deadline.remaining(), _shut, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _send(connection: ClientConnection, text: str) -> None:
    try:
        connection.send(text)
    except (ConnectionClosed, OSError):
        # A full server says so and closes, perhaps before our request is out. What it said is still there to be read.
        with contextlib.suppress(ConnectionClosed):
            _refuse_unasked(connection)
        raise


def _refuse_unasked(connection: ClientConnection) -> None:
    """Raise for a message that arrived before its request: taken as the reply, it would shift all replies by one."""
    try:
        frame = connection.recv(timeout=0)
    except TimeoutError:
        return
    raise protocol.parse_unasked(frame)


def _shut(connection: ClientConnection) -> None:
    """Shut the TCP connection, which wakes every thread that reads or writes it."""
    with contextlib.suppress(OSError):  # it is shut already
        # Not the method of an SSLSocket: that one drops the encryption before it shuts the connection.
        socket.socket.shutdown(connection.socket, socket.SHUT_RDWR)


def _aborted() -> SessionAbortedError:
    return SessionAbortedError("the session was aborted")


def _reason(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


def _closed_error(exc: ConnectionClosed, operation: str, size: int, settings: SessionSettings) -> SessionLost:
    """Which side closed, and why."""
    if exc.sent is not None and not exc.rcvd_then_sent:
        side, other, close = "client", "server", exc.sent
    elif exc.rcvd is not None:
        side, other, close = "server", "client", exc.rcvd
    else:
        hint = f"; the request had {size} bytes, perhaps more than the server allows" if size > 2**20 else ""
        cause = f": {_reason(exc.__cause__)}" if exc.__cause__ else ""
        return SessionLost(f"the connection was cut during {operation}{cause}{hint}")
    reason = f" ({close.reason})" if close.reason else ""
    if close.code == _TOO_BIG and "fragments" not in close.reason:
        if side == "client":
            limit = settings.max_message_size
            return MessageTooBigError(
                f"the reply to {operation} is bigger than max_message_size={limit} bytes",
                side=side,
                limit=limit,
                close_code=close.code,
                remedy="Raise max_message_size or make the observation smaller.",
            )
        named = re.search(r"limit of (\d+)", close.reason)
        return MessageTooBigError(
            f"the server refused {operation} as too big: it has about {size} bytes{reason}",
            side=side,
            limit=int(named[1]) if named else None,
            close_code=close.code,
            remedy="Raise the server's message limit (uvicorn: --ws-max-size) or send less.",
        )
    if close.code == _INTERNAL_ERROR and "ping" in close.reason:
        return KeepaliveError(
            f"connection closed by keepalive during {operation}: the {side} got no answer to its ping from the {other}",
            close_code=close.code,
        )
    if side == "client":
        return ProtocolError(
            f"the server broke the WebSocket protocol during {operation}: closed with {close.code}{reason}",
            close_code=close.code,
        )
    refused = close.code in _REFUSALS
    return SessionLost(
        f"the server closed the connection during {operation} with code {close.code}{reason}",
        close_code=close.code,
        transient=not refused,
        remedy="See the server's log: it refuses what was sent, or who sent it (token, headers)." if refused else None,
    )


def _connect_error(exc: Exception, deadline: Deadline) -> OpenEnvError:
    """The error for a connection that could not be opened, and whether trying again may help."""
    if isinstance(exc, OpenEnvError):
        return exc
    if isinstance(exc, InvalidProxyStatus):
        return _status_error(exc.response, "proxy")
    refused = isinstance(exc, ssl.SSLCertVerificationError)  # which is a ValueError as well
    if isinstance(exc, (InvalidURI, InvalidProxy, ImportError, ValueError)) and not refused:
        # Others than these say it without the address, which may hold a password.
        fault = (
            f": {exc.msg}" if isinstance(exc, (InvalidURI, InvalidProxy)) else f": {exc}" * isinstance(exc, ImportError)
        )
        return ConfigurationError(f"the address of the server or of its proxy is unusable{fault}", remedy=_ADDRESSES)
    if isinstance(exc, ConnectionRefusedError):
        return ConnectError("connection refused: nothing listens there", transient=True)
    if isinstance(exc, socket.gaierror):
        return ConnectError(f"the host name cannot be resolved: {exc}", transient=exc.errno == socket.EAI_AGAIN)
    if isinstance(exc, TimeoutError):
        return ConnectError(f"no connection within {deadline.seconds:.3g} s", transient=True)
    if isinstance(exc, ssl.SSLCertVerificationError):
        return ConnectError(f"the server's certificate is refused: {exc.verify_message}", remedy=_CERTIFICATE)
    if isinstance(exc, ssl.SSLEOFError):
        return ConnectError("the connection was cut during the TLS handshake", transient=True, remedy=_NO_TLS)
    if isinstance(exc, ssl.SSLError):
        return ConnectError(f"TLS failed: {exc}", remedy=_NO_TLS)
    # If sending the handshake fails, websockets says just that the connection is closed.
    if isinstance(exc, (ConnectionError, ConnectionClosed)) or isinstance(exc.__cause__, EOFError):
        reason = _reason(exc.__cause__ or exc)
        return ConnectError(f"the connection was cut during the handshake: {reason}", transient=True)
    if isinstance(exc, OSError):
        return ConnectError(f"the connection failed: {_reason(exc)}", transient=True)
    detail = f": {exc.__cause__}" if isinstance(exc, (InvalidMessage, InvalidProxyMessage)) else ""
    return ConnectError(f"the WebSocket handshake failed: {_reason(exc)}{detail:.200}")


def _status_error(response: Response, who: str) -> ConnectError:
    status, remedy, where = response.status_code, None, ""
    if 300 <= status < 400:
        where = f" to {protocol.without_secrets(response.headers.get('Location', 'nowhere'))!r:.200}"
        remedy = "Give the address to which it redirects."
    elif status == 407:
        remedy = "Put user name and password into the address of the proxy."
    elif status == 401:
        remedy = 'Give the server\'s token: token=…, for a scheduler env_settings={"token": …}.'
    elif status == 403:
        remedy = "Check the path of base_url and its host name; a local server takes 127.0.0.1 and localhost."
    elif status == 404:
        remedy = "Check the path of base_url: the endpoint is the address of the server plus /ws."
    return ConnectError(
        f"the {who} answered the handshake with HTTP {status}{where}",
        status=status,
        transient=status >= 500 or status in (408, 425, 429),
        remedy=remedy,
    )

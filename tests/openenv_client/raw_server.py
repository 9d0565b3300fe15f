"""A server without manners: what it sends is written by hand, byte by byte, for what MockEnvServer cannot do."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from websockets.utils import accept_key

if TYPE_CHECKING:
    from typing_extensions import Self

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
UPGRADE = (
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {}\r\n"
)


def frame(payload: bytes | str = b"", opcode: int = TEXT, *, fin: bool = True, rsv1: bool = False) -> bytes:
    """A WebSocket frame as a server sends it."""
    data = payload.encode() if isinstance(payload, str) else payload
    first = fin << 7 | rsv1 << 6 | opcode
    if len(data) < 126:
        return struct.pack("!BB", first, len(data)) + data
    if len(data) < 2**16:
        return struct.pack("!BBH", first, 126, len(data)) + data
    return struct.pack("!BBQ", first, 127, len(data)) + data


def closing(code: int, reason: str = "") -> bytes:
    """A close frame."""
    return frame(struct.pack("!H", code) + reason.encode(), CLOSE)


def observation(**fields: Any) -> str:
    """The reply to a reset or step."""
    return json.dumps({"type": "observation", "data": {"observation": fields, "reward": 1.0}})


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self.sock = sock
        self.stopping = stopping

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read_head(self) -> str:
        """The request line and headers of the handshake."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._read(1)
        return head.decode()

    def shake_hands(self, headers: str = "") -> None:
        key = next(line for line in self.read_head().splitlines() if line.lower().startswith("sec-websocket-key"))
        self.send((UPGRADE.format(accept_key(key.split()[1])) + headers + "\r\n").encode())

    def read_request(self) -> dict[str, Any]:
        """The next message; pings before it are answered."""
        while True:
            opcode, data = self._read_frame()
            if opcode == TEXT:
                request: dict[str, Any] = json.loads(data)
                return request
            if opcode == PING:
                self.send(frame(data, PONG))

    def answer_ping(self) -> None:
        """The client sends one behind each reply."""
        opcode, data = self._read_frame()
        assert opcode == PING
        self.send(frame(data, PONG))

    def _read_frame(self) -> tuple[int, bytes]:
        first, second = self._read(2)
        length = second & 127
        if length > 125:
            length = int.from_bytes(self._read(2 if length == 126 else 8), "big")
        mask, data = self._read(4), self._read(length)
        key = (mask * (length // 4 + 1))[:length]
        return first & 15, (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")

    def drain(self) -> None:
        """Read until the client hangs up, and answer nothing."""
        while self.sock.recv(65536):
            pass

    def hold(self) -> None:
        """Do nothing, not even read, until the test is over."""
        self.stopping.wait()

    def play(self, steps: int | None = None) -> None:
        """Do what an environment server does, until the client says goodbye or this was the last of the steps."""
        self.shake_hands()
        step = 0
        while step != steps:
            request = self.read_request()
            if request["type"] == "close":
                self.send(closing(1000))
                return self.drain()
            step = 0 if request["type"] == "reset" else step + 1
            self.send(frame(observation(step=step, action=request["data"])))
        return None

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self.sock.recv(min(count - len(data), 2**16))
            if not more:
                raise ConnectionError("the client hung up")
            data += more
        return bytes(data)


class RawServer:
    """Listens on a free port of the loopback interface and plays a script on the first connection.

    Args:
        script: What happens to it; it is closed at the end.
        then: What happens to all others.
        tls: Speak TLS, in the script too if it is a script for TLS.
        plain: It is not: the script gets the connection as it is.
    """

    def __init__(
        self,
        script: Callable[[Peer], object],
        *,
        then: Callable[[Peer], object] = Peer.play,
        tls: ssl.SSLContext | None = None,
        plain: bool = False,
    ) -> None:
        self._scripts = self._in_order(script, then)
        self._tls = tls
        self._plain = plain
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []

    @staticmethod
    def _in_order(
        script: Callable[[Peer], object], then: Callable[[Peer], object]
    ) -> Iterator[Callable[[Peer], object]]:
        yield script
        while True:
            yield then

    @property
    def base_url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._run(self._accept)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                self._run(self._serve, sock, next(self._scripts))

    def _serve(self, sock: socket.socket, script: Callable[[Peer], object]) -> None:
        with sock, contextlib.suppress(OSError):  # the client hung up
            if self._tls is None or (self._plain and sock is self._open[0]):
                script(Peer(sock, self._stopping))
            else:
                with self._tls.wrap_socket(sock, server_side=True) as secure:
                    script(Peer(secure, self._stopping))

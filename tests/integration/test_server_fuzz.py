"""Whatever bytes arrive at the server's socket: it survives, logs no fault of its own, and other sessions go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import string
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from examples.sudoku.board import Board, solve
from openenv_client import OpenEnvWrapper
from server_scripts.launch import ServerProcess
from tests.examples.sudoku.games import right_moves

ATTACKS = 150  # of each kind
HARMLESS_LINES = {
    "WARNING:  Invalid HTTP request received.",
    "WARNING:  Unsupported upgrade request.",
    "WARNING:asyncio:socket.send() raised exception.",  # the client was gone
}

HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
REQUESTS = [
    '{"type":"reset","data":{"seed":7}}',
    '{"type":"step","data":{"message":"[1 1 1]"}}',
    '{"type":"state"}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","id":1,"method":"tools/call"}}',
    '{"type":"close"}',
]


# What is sent. Each kind gives the bytes of one connection, in pieces.


def garbage(rng: random.Random) -> list[bytes]:
    """Anything at all."""
    start = rng.choice([b"", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    return [start, *(rng.randbytes(rng.choice([1, 10, 1000, 70_000])) for _ in range(rng.randint(1, 3)))]


def broken_handshakes(rng: random.Random) -> list[bytes]:
    """A handshake in which a few bytes or a whole line are wrong."""
    text = bytearray(HANDSHAKE)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text))
        match rng.randrange(4):
            case 0:
                text[place] = rng.randrange(256)
            case 1:
                del text[place : place + rng.randint(1, 30)]
            case 2:
                text[place:place] = rng.randbytes(rng.randint(1, 5))
            case 3:
                lines = bytes(text).split(b"\r\n")
                lines.insert(rng.randrange(len(lines)), header(rng) * rng.choice([1, 1, 1, 200]))
                text = bytearray(b"\r\n".join(lines))
    return [bytes(text), frame(rng, 1, b"hello")]


def header(rng: random.Random) -> bytes:
    """A line that a handshake need not have."""
    return rng.choice(
        [
            b"Host: 127.0.0.1\r\n",
            b"Upgrade: h2c\r\n",
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=99\r\n",
            b"Sec-WebSocket-Protocol: \xff, ,\r\n",
            b"Origin: http://127.0.0.1\r\n",
            b"X-Header: " + b"x" * rng.choice([10, 9000, 20_000]) + b"\r\n",
            b"Expect: 100-continue\r\n",
        ]
    )


def http_requests(rng: random.Random) -> list[bytes]:
    """Requests to every route, with bodies that are too long, too short, or no JSON that it wants."""
    body = shape(rng).encode("utf-8", "surrogatepass")
    length = rng.choice([len(body)] * 4 + [len(body) - 1, len(body) + 9, -1, 10**30])
    method = rng.choice(["GET", "POST", "POST", "PUT", "HEAD", "OPTIONS", "XYZ"])
    path = rng.choice(["/reset", "/step", "/state", "/ws", "/mcp", "/sessions", "/docs", "/x/tasks", "/%00", "//", "*"])
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    if rng.random() < 0.2:
        chunks = b"%x\r\n%b\r\n" % (rng.choice([len(body), 1, 2**70]), body)
        return [head.encode() + b"Transfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n"]
    return [head.encode() + f"Content-Length: {length}\r\n\r\n".encode(), body] * rng.choice([1, 1, 3])


def frames(rng: random.Random) -> list[bytes]:
    """Frames that break the rules of WebSocket, and some that keep them."""
    made = [HANDSHAKE]
    for _ in range(rng.randint(1, 6)):
        payload = rng.choice(
            [b"", b"\x03", rng.randbytes(2), rng.randbytes(126), *(text.encode() for text in REQUESTS)]
        )
        opcode = rng.choice([0, 1, 1, 2, 8, 9, 10, rng.randrange(16)])
        if opcode == 8 and rng.random() < 0.5:
            payload = struct.pack("!H", rng.choice([0, 999, 1000, 1005, 1006, 1015, 2999, 65535])) + rng.choice(
                [b"", b"bye", b"\xff", b"x" * 123]
            )
        made.append(
            frame(
                rng,
                opcode,
                payload,
                fin=rng.random() < 0.7,
                reserved=rng.choice([0] * 6 + [1, 4, 7]),
                masked=rng.random() < 0.9,
                length=rng.choice([None] * 8 + [0, len(payload) + 1, 2**22 + 1, 2**63 - 1, 2**64 - 1]),
            )
        )
    return made


def messages(rng: random.Random) -> list[bytes]:
    """Messages in good frames, whole or in fragments, of JSON that no request looks like, or of no JSON at all."""
    made = [HANDSHAKE]
    for _ in range(rng.randint(1, 6)):
        text = rng.choice(REQUESTS) if rng.random() < 0.3 else shape(rng)
        payload = rng.randbytes(20) if rng.random() < 0.1 else text.encode("utf-8", "surrogatepass")
        opcode = 2 if rng.random() < 0.1 else 1
        if rng.random() < 0.3:
            cut = rng.randint(0, len(payload))
            made += [frame(rng, opcode, payload[:cut], fin=False), frame(rng, 9, b"ping"), frame(rng, 0, payload[cut:])]
        else:
            made.append(frame(rng, opcode, payload))
    return made


def frame(
    rng: random.Random,
    opcode: int,
    payload: bytes,
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: int | None = None,
) -> bytes:
    """One WebSocket frame; `length` is what it says of its payload."""
    length = len(payload) if length is None else length
    first = fin << 7 | reserved << 4 | opcode
    if length < 126:
        head = struct.pack("!BB", first, masked << 7 | length)
    elif length < 2**16:
        head = struct.pack("!BBH", first, masked << 7 | 126, length)
    else:
        head = struct.pack("!BBQ", first, masked << 7 | 127, length)
    if not masked:
        return head + payload
    mask = rng.randbytes(4)
    return head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))


def shape(rng: random.Random) -> str:
    """JSON, mostly of the outer form of a request."""
    kinds: list[Any] = ["reset", "step", "state", "mcp", "close", "\ud800", "x" * 1000, 5, None, [], {}]
    match rng.randrange(6):
        case 0:
            return dump(rng, value(rng))
        case 1:
            return rng.choice(["[", '{"type":', '{"data":{"a":']) * rng.choice([10, 900, 100_000])
        case 2:
            return rng.choice(REQUESTS)[: rng.randint(0, 40)]
        case 3:
            number = rng.choice(["9" * 5000, "9" * 4000, "1e999", "-0", "NaN", "Infinity", "1" + "0" * 400 + ".5"])
            return '{"type":"reset","data":{"seed":' + number + "}}"
        case 4:
            names = ["seed", "episode_id", "self", "session_id", "message", "timeout_s", "\udfff", ""]
            data = {rng.choice(names): value(rng) for _ in range(rng.randint(0, 3))}
            return dump(rng, {"type": rng.choice(kinds[:5]), "data": data})
        case _:
            request = {"type": rng.choice(kinds), "data": value(rng), "id": value(rng)}
            return dump(rng, {name: request[name] for name in request if rng.random() < 0.8})


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with characters that have no UTF-8 form among its texts."""
    simple: list[Any] = [
        None,
        True,
        0,
        -1,
        2**64,
        10**400,
        1.5,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "[1 1 1]",
        "\ud83d",
    ]
    kind = rng.randrange(4 if depth < 4 else 2)
    if kind == 0:
        return rng.choice(simple)
    if kind == 1:
        return "".join(rng.choice([*string.printable, "\0", "\udc00", "\U0001f600"]) for _ in range(rng.randrange(30)))
    if kind == 2:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(value(rng, 9)): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def dump(rng: random.Random, thing: Any) -> str:
    return json.dumps(thing, ensure_ascii=rng.random() < 0.7)


KINDS: list[Callable[[random.Random], list[bytes]]] = [garbage, broken_handshakes, http_requests, frames, messages]


# How it is sent


def attack(address: tuple[str, int], kind: Callable[[random.Random], list[bytes]], seed: str) -> socket.socket | None:
    """Send the bytes of one connection and end it in one of several ways; None, or the socket when it is left open."""
    rng = random.Random(seed)
    client = socket.create_connection(address, timeout=60)
    try:
        for piece in kind(rng):
            client.sendall(piece)
            if piece == HANDSHAKE:
                read_answer(client)  # what comes before it is answered is no frame
    except OSError:
        pass  # the server has had enough
    end = rng.choice(["leave", "close", "half", "reset"] + ["answer"] * 4)
    if end == "leave":
        return client
    if end == "answer":
        client.settimeout(0.05)
        try:
            while client.recv(2**16):
                pass
        except OSError:
            pass
    elif end == "half":
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
    elif end == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    return None


def read_answer(client: socket.socket) -> None:
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        if not byte:
            return
        answer += byte


# The other sessions


def play(env: OpenEnvWrapper) -> list[Any]:
    """A whole game of one seed, with its won end: everything that the client was told."""
    told: list[Any] = [env.reset(seed=11)]
    board = Board.from_rows(told[0].observation["board"])
    solution = solve(board)
    assert solution is not None
    told += [env.step({"message": str(move)}) for move in right_moves(board, solution)]
    assert told[-1].done
    assert told[-1].reward == 1.0
    return told


@pytest.fixture
def seed() -> str:
    """Of all that is random; FUZZ_SEED repeats a run."""
    chosen = os.environ.get("FUZZ_SEED") or secrets.token_hex(4)
    print(f"FUZZ_SEED={chosen}")  # noqa: T201 - shown when the test fails
    return chosen


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A server of its own, with room for all connections that are left open."""
    with ServerProcess(env_id="Sudoku-v0-very-easy", max_concurrent_envs=ATTACKS * len(KINDS)) as server:
        yield server


def count(server: ServerProcess, what: str) -> int:
    """How many open files (``fd``) or threads (``task``) the server has."""
    return len(list(Path(f"/proc/{server.process.pid}/{what}").iterdir()))


def test_any_bytes_are_survived_and_other_sessions_go_on(server: ServerProcess, seed: str) -> None:
    """While hundreds of connections misbehave, a session plays whole games, each exactly as when nothing else went on.

    At the end no session, file or thread is left over, and the server has logged nothing but that requests were
    invalid. The client is told not to recover: the very session must go on.
    """
    url = urlsplit(server.base_url)
    address = (url.hostname or "", url.port or 0)
    with OpenEnvWrapper(base_url=server.base_url, recover="never") as env:
        expected = play(env)
    server.wait_until_idle()
    greeting = server.output
    files, threads = count(server, "fd"), count(server, "task")

    attacks: list[Future[socket.socket | None]]
    with ThreadPoolExecutor(8) as pool, OpenEnvWrapper(base_url=server.base_url, recover="never") as env:
        attacks = [
            pool.submit(attack, address, kind, f"{seed} {kind.__name__} {number}")
            for number in range(ATTACKS)
            for kind in KINDS
        ]
        games = [play(env)]
        while not all(done.done() for done in attacks):
            games.append(play(env))
        left_open = [client for done in attacks if (client := done.result()) is not None]
        games.append(play(env))
        for client in left_open:
            client.close()
    assert len(games) > 2
    assert all(game == expected for game in games)

    server.wait_until_idle(timeout=60)
    connection = HTTPConnection(*address, timeout=60)
    connection.request("GET", "/health", headers={"Connection": "close"})
    assert json.loads(connection.getresponse().read()) == {"status": "healthy"}
    connection.close()
    deadline = time.monotonic() + 60
    while count(server, "fd") > files or count(server, "task") > threads + 4:  # four for POST requests, which stay
        assert time.monotonic() < deadline, (files, count(server, "fd"), threads, count(server, "task"))
        time.sleep(0.05)
    logged = server.output.removeprefix(greeting)
    assert {line for line in logged.splitlines() if line} <= HARMLESS_LINES, logged

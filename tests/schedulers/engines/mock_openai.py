"""A server that speaks OpenAI's protocol as far as it is told to, with everything that can go wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

MODEL = "tiny"


@dataclass(frozen=True)
class Reply:
    """How a request is answered.

    Args:
        body: JSON, or text that is sent as it is.
        status: Of HTTP.
        headers: Further ones.
        fault: ``"cut"`` promises more than it sends, ``"drop"`` sends nothing and closes, ``"hang"`` sends nothing
            until the client is gone.
    """

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    path: str
    body: Any
    authorization: str | None


class MockOpenAI:
    """Answers each POST by the next of ``replies``, replies or functions of the request, and those after by the last.

    Args:
        replies: In the order of the requests.
        models: What ``/v1/models`` lists, and the context lengths; None answers 404.
    """

    def __init__(self, *replies: Reply | Callable[[Asked], Reply], models: dict[str, int | None] | None = None) -> None:
        self.replies = list(replies)
        self.models = {MODEL: 4096} if models is None else models
        self.asked: list[Asked] = []
        self.arrived = threading.Semaphore(0)
        self.left = threading.Event()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"mock": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def base_url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    @property
    def posts(self) -> list[Any]:
        """The bodies that were posted."""
        return [asked.body for asked in self.asked if asked.body is not None]

    def take(self, asked: Asked) -> Reply:
        """Note a request and choose its answer."""
        with self._lock:
            self.asked.append(asked)
            if asked.body is None:
                cards = [{"id": name, "max_model_len": length} for name, length in self.models.items()]
                return Reply({"data": cards}) if self.models else Reply(status=404)
            reply = self.replies[min(len(self.posts), len(self.replies)) - 1]
        self.arrived.release()
        return reply(asked) if callable(reply) else reply

    def enter(self, change: int) -> None:
        """Count who is here."""
        with self._lock:
            self._at_once += change
            self.most_at_once = max(self.most_at_once, self._at_once)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mock: MockOpenAI

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.mock.enter(1)
        reply = self.mock.take(Asked(self.path, body, self.headers["Authorization"]))
        self.mock.enter(-1)  # before the answer, after which the client sends the next request
        if reply.fault in ("hang", "drop"):
            if reply.fault == "hang":
                self.rfile.read(1)  # until the client closes the connection
                self.mock.left.set()
            self.close_connection = True
            return
        content = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(content) + (reply.fault == "cut")))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = reply.fault == "cut"

    def log_message(self, *_: Any) -> None: ...


def completion(ids: list[int], *, finish_reason: str = "stop", **changes: Any) -> Reply:
    """What vLLM answers to a prompt of ids; the log-probability of each id is minus a thousandth of it."""
    logprobs = {"token_logprobs": [-token / 1000 for token in ids]}
    choice = {"text": "not looked at", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish_reason}
    return Reply({"model": MODEL, "choices": [{**choice, **changes}]})


def chat(text: str | None, *, finish_reason: str = "stop") -> Reply:
    """What a server of chat completions answers."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}
    return Reply({"model": "tiny-0711", "choices": [choice], "usage": usage})

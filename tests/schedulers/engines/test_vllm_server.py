from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from schedulers.engines.vllm_server import VLLMServerWeights
from tests.schedulers.engines.tiny_model import make_model


class FakeServer(BaseHTTPRequestHandler):
    """Notes what it is asked, and reads the weights as vLLM would."""

    asked: list[tuple[str, Any]]
    loaded: dict[str, Any]
    answers: dict[str, tuple[int, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        FakeServer.asked.append((self.path, body))
        if self.path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            FakeServer.loaded = safetensors.torch.load_file(folder / "model.safetensors")
        status, answer = FakeServer.answers.get(self.path, (200, {}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def base_url() -> Iterator[str]:
    FakeServer.asked, FakeServer.answers = [], {}
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_all_weights_are_handed_over_in_a_file_that_is_gone_afterwards(base_url: str, tmp_path: Path) -> None:
    """Those of a tied output layer too, though they share memory."""
    model = make_model(tie_word_embeddings=True)
    VLLMServerWeights(base_url + "/v1", weights_dir=tmp_path).load_weights(model.state_dict())
    assert [path for path, _ in FakeServer.asked] == ["/collective_rpc", "/reset_prefix_cache"]
    assert FakeServer.asked[0][1]["method"] == "reload_weights"
    assert FakeServer.loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(FakeServer.loaded[name], weight) for name, weight in model.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_weights_without_the_tied_output_layer_are_refused(base_url: str) -> None:
    model = make_model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lack lm_head\.weight.*pass model\.state_dict\(\)"):
        VLLMServerWeights(base_url).load_weights(dict(model.named_parameters()))
    assert FakeServer.asked == []


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/collective_rpc": (404, {})}, "answered 404; start the server with VLLM_SERVER_DEV_MODE=1"),
        ({"/collective_rpc": (500, {"error": "no such weight"})}, "answered 500: .*no such weight"),
        ({"/reset_prefix_cache": (200, {"success": False})}, "did not forget its prefix cache"),
    ],
)
def test_a_server_that_does_not_take_the_weights_is_an_error(
    base_url: str, answers: dict[str, tuple[int, Any]], message: str
) -> None:
    FakeServer.answers = answers
    with pytest.raises(RuntimeError, match=message):
        VLLMServerWeights(base_url).load_weights(make_model().state_dict())


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:9/collective_rpc cannot be reached"):
        VLLMServerWeights("http://127.0.0.1:9").load_weights(make_model().state_dict())

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors
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
        self.do_GET()

    def do_GET(self) -> None:
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


def test_a_folder_is_named_by_its_whole_path(base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have been started elsewhere."""
    monkeypatch.chdir(tmp_path)
    VLLMServerWeights(base_url, weights_dir=".").load_weights(make_model().state_dict())
    assert Path(FakeServer.asked[0][1]["kwargs"]["weights_path"]).parent == tmp_path


def test_weights_without_the_tied_output_layer_are_refused(base_url: str) -> None:
    model = make_model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lack lm_head\.weight.*pass model\.state_dict\(\)"):
        VLLMServerWeights(base_url).load_weights(dict(model.named_parameters()))
    assert FakeServer.asked == []


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/collective_rpc": (404, {})}, "answered 404: .*; start the server with VLLM_SERVER_DEV_MODE=1"),
        (
            {"/collective_rpc": (500, {"error": "no such weight"})},
            r"answered 500: .*no such weight.*; can it read .*weights-\w+ \(weights_dir\)",
        ),
        ({"/reset_prefix_cache": (200, {"success": False})}, "did not forget its prefix cache"),
    ],
)
def test_a_server_that_does_not_take_the_weights_is_an_error(
    base_url: str, answers: dict[str, tuple[int, Any]], message: str
) -> None:
    FakeServer.answers = answers
    with pytest.raises(RuntimeError, match=message):
        VLLMServerWeights(base_url).load_weights(make_model().state_dict())


def test_weights_that_cannot_be_written_are_an_error(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a /dev/shm that is too small."""

    def full(*_: Any) -> None:
        raise safetensors.SafetensorError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=rf"cannot be written to {tmp_path}/weights-\w+: no space left"):
        VLLMServerWeights(base_url, weights_dir=tmp_path).load_weights(make_model().state_dict())
    assert FakeServer.asked == []


@pytest.mark.parametrize(
    "cards",
    [
        [{"id": "tiny"}],
        [{"id": "tiny", "root": "models/tiny"}, {"id": "alias", "root": "models/tiny"}],
        [{"id": "tiny", "root": "models/tiny"}, {"id": "adapter", "root": "adapters/one", "parent": "tiny"}],
    ],
    ids=["one name", "two names", "an adapter"],
)
def test_the_name_of_the_model_is_asked_for(base_url: str, cards: list[dict[str, str]]) -> None:
    FakeServer.answers = {"/v1/models": (200, {"data": cards})}
    assert VLLMServerWeights(base_url).served_model() == "tiny"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"data": [{"id": "one"}, {"id": "two"}]}), "serves one, two; it must be one model"),
        ((200, {"data": []}), "serves nothing"),
        ((200, {"models": ["tiny"]}), "does not list models: .*tiny"),
        ((200, ["tiny"]), "does not list models"),
        ((401, {}), "answered 401: .*; it wants a key"),
    ],
)
def test_a_server_that_names_no_single_model_is_an_error(base_url: str, answer: tuple[int, Any], message: str) -> None:
    FakeServer.answers = {"/v1/models": answer}
    with pytest.raises(RuntimeError, match=message):
        VLLMServerWeights(base_url).served_model()


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        weights = VLLMServerWeights(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(RuntimeError, match="/v1/models cannot be reached: timed out"):
            weights.served_model(timeout=0.05)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="base_url must be an address"):
        VLLMServerWeights("127.0.0.1:8000")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:9/collective_rpc cannot be reached"):
        VLLMServerWeights("http://127.0.0.1:9").load_weights(make_model().state_dict())

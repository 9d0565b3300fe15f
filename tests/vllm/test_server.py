"""A vLLM server takes over a trainer's weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedulers.engines.vllm_server import VLLMServerWeights
from tests.vllm.models import changed, forward_logprobs

PROMPT = [5 + 3 * i % 400 for i in range(140)]  # longer than a block of the prefix cache


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - to 127.0.0.1
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return json.loads(response.read())


@pytest.fixture(scope="module")
def server(bpe_policy: tuple[Path, Any, Any]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [
        "--model",
        str(bpe_policy[0]),
        "--served-model-name",
        "policy",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    arguments += ["--port", str(port), "--host", "127.0.0.1", "--kv-cache-memory-bytes", str(2**28)]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        try:
            lines: list[str] = []
            while not lines or "Application startup complete" not in lines[-1]:
                lines.append(output.readline())
                assert lines[-1], "the server did not start:\n" + "".join(lines[-40:])
            drain = threading.Thread(target=output.read)  # so that the server never waits to be read
            drain.start()
            while not listens(port):  # it says that it is up a moment before it is
                assert process.poll() is None, "the server stopped"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)
        drain.join()


def listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def furthest(base_url: str, model: Any) -> float:
    """The largest difference between the server's log-probabilities and those of a forward pass."""
    choice = post(
        base_url + "/v1/completions",
        {
            "model": "policy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "logprobs": 0,
            "return_token_ids": True,
        },
    )["choices"][0]  # fmt: skip
    expected = forward_logprobs(model, PROMPT, choice["token_ids"])
    return float(max(abs(a - b) for a, b in zip(choice["logprobs"]["token_logprobs"], expected, strict=True)))


def test_a_server_samples_with_the_weights_it_was_given(server: str, bpe_policy: tuple[Path, Any, Any]) -> None:
    """The model's output layer is its embedding; the server holds a copy of it."""
    model = bpe_policy[1]
    assert furthest(server, model) < 1e-4
    weights = VLLMServerWeights(server + "/v1")
    for seed in (1, 2):
        other = changed(model, seed)
        weights.load_weights(other.state_dict())
        assert furthest(server, other) < 1e-4
        assert furthest(server, model) > 1e-3

"""These tests need vLLM, which CI has as a build for CPUs in an environment of its own: ``make vllm-test``."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedulers.engines.vllm_server import VLLMServerWeights

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Read by vLLM when it is imported: LLM computes in this process, which starts in seconds.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from schedulers.engines.vllm import VLLMEngine

    from benchmarks.spellings import make_policy
    from tests.vllm.models import POLICY, start


def pytest_configure(config: pytest.Config) -> None:
    """Let vLLM leave its sockets' context to the garbage collector."""
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context:ResourceWarning")


@pytest.fixture(scope="session")
def policy_engine() -> Iterator[VLLMEngine]:
    """``LLM`` with the embedded policy."""
    with start(POLICY) as engine:
        yield engine


@pytest.fixture(scope="session")
def bpe_policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder, a model whose output layer is its embedding, and a BPE tokenizer."""
    folder = tmp_path_factory.mktemp("bpe-policy")
    model, tokenizer = make_policy()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture(scope="session")
def batched(bpe_policy: tuple[Path, Any, Any]) -> Iterator[VLLMEngine]:
    """``LLM`` with the BPE policy."""
    with start(bpe_policy[0]) as engine:
        yield engine


@pytest.fixture(scope="session")
def asynchronous(bpe_policy: tuple[Path, Any, Any]) -> Iterator[VLLMEngine]:
    """``AsyncLLM`` with the BPE policy."""
    with start(bpe_policy[0], asynchronous=True) as engine:
        yield engine


@pytest.fixture(params=["batched", "asynchronous"])
def engine(request: pytest.FixtureRequest) -> VLLMEngine:
    """Both of them, one after the other."""
    made: VLLMEngine = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="session")
def _running_server(bpe_policy: tuple[Path, Any, Any]) -> Iterator[str]:
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
        "--no-enable-chunked-prefill",  # see VLLMEngine.from_pretrained
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
            while not _listens(port):  # it says that it is up a moment before it is
                assert process.poll() is None, "the server stopped"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)
        drain.join()


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def vllm_server(_running_server: str, bpe_policy: tuple[Path, Any, Any]) -> str:
    """The address of a vLLM server with the BPE policy, whose weights earlier tests may have replaced."""
    VLLMServerWeights(_running_server).load_weights(bpe_policy[1].state_dict())
    return _running_server

"""These tests need vLLM, which CI has as a build for CPUs in an environment of its own: ``make vllm-test``."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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

    from tests.vllm.models import POLICY, make_bpe_policy, start


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
    model, tokenizer = make_bpe_policy()
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

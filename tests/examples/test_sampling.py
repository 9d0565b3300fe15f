"""What samples the games of training: a vLLM server is tried out before anything is played."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import transformers

from examples import sampling
from examples.sampling import Sampler, sampler
from schedulers.commands.names import WrongUse
from tests.examples.test_training import SETTINGS
from tests.schedulers.engines.mock_openai import Asked, MockOpenAI, Reply, completion
from tests.schedulers.engines.tiny_model import make_model

TOKENIZER = transformers.AutoTokenizer.from_pretrained(SETTINGS.model)


def vllm(**replies: Reply) -> Callable[[Asked], Reply]:
    """Answers as a vLLM server does, except where told otherwise."""
    usual = {"completions": completion([5]), "collective_rpc": Reply({"results": [None]})}
    usual["reset_prefix_cache"] = Reply({"success": True})
    return lambda asked: {**usual, **replies}[asked.path.rpartition("/")[2]]


@contextlib.contextmanager
def started(server: MockOpenAI) -> Iterator[Sampler]:
    with sampler(replace(SETTINGS, vllm_server=server.base_url), make_model(), TOKENIZER) as found:
        assert found is not None
        yield found


def test_a_server_is_tried_out_given_the_weights_and_kept_in_step() -> None:
    update = ["/collective_rpc", "/reset_prefix_cache"]
    with MockOpenAI(vllm()) as server, started(server) as found:
        assert [asked.path for asked in server.asked if asked.body is not None] == ["/v1/completions", *update]
        assert server.posts[0]["model"] == "tiny"
        assert found.engine.tokenizer is TOKENIZER
        found.load_weights(make_model().state_dict())
        assert [asked.path for asked in server.asked][-2:] == update


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"models": {"one": 8, "two": 8}}, "serves one, two; it must be one model"),
        ({"completions": completion([5], token_ids=None)}, "knows return_token_ids"),
        ({"completions": Reply(fault="hang")}, "no answer within total_timeout"),
        ({"collective_rpc": Reply({}, 404)}, "start the server with VLLM_SERVER_DEV_MODE=1"),
        ({"collective_rpc": Reply("no such file", 500)}, r"no such file.*can it read .* \(weights_dir\)"),
    ],
    ids=["two models", "no ids", "hangs", "no dev mode", "weights that it cannot read"],
)
def test_a_server_that_training_cannot_use_is_refused(
    server: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, which says how to start one that it can use."""
    monkeypatch.setattr(sampling, "_TRIAL_TIMEOUT", 0.5)
    models = server.pop("models", None)
    said = f"^--vllm-server .*{message}.*VLLM_SERVER_DEV_MODE=1 python -m .*$"
    with MockOpenAI(vllm(**server), models=models) as mock, pytest.raises(WrongUse, match=said), started(mock):
        pass


def test_a_server_that_fails_later_ends_the_run_in_the_same_way() -> None:
    with MockOpenAI(vllm()) as server, started(server) as found:
        server.replies[:] = [Reply({}, 503)]
        with pytest.raises(WrongUse, match=r"--vllm-server .*/collective_rpc answered 503"):
            found.load_weights(make_model().state_dict())


def test_without_its_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulers.engines.openai", None)
    with (
        pytest.raises(WrongUse, match="--vllm-server: "),
        sampler(replace(SETTINGS, vllm_server="http://a"), None, None),
    ):
        pass


def test_without_vllm_the_model_samples_itself() -> None:
    with sampler(SETTINGS, None, None) as found:
        assert found is None

"""New weights for a vLLM server, through a folder that trainer and server can both read."""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schedulers.checks import check_seconds
from schedulers.engines.addresses import http_address

__all__ = ["VLLMServerWeights", "refuse_without_output_layer", "saved_weights"]

_DEV_MODE = {404: "start the server with VLLM_SERVER_DEV_MODE=1"}


class VLLMServerWeights:
    """Replaces the weights of a running vLLM server by a trainer's.

    The server must run with ``VLLM_SERVER_DEV_MODE=1`` in its environment, without which it takes no weights, and its
    port must be out of reach for everyone else.

    Args:
        base_url: Where the server is, such as ``http://127.0.0.1:8000``; an ending ``/v1`` does not matter.
        weights_dir: A folder that the server can read, under the same path; None takes this machine's for temporary
            files. Put it on a shared file system when the server is on another machine, or in ``/dev/shm`` for speed.
        timeout: Seconds that one request to the server may take.

    Raises:
        ValueError: ``base_url`` is no address, or ``timeout`` is not positive.
    """

    def __init__(self, base_url: str, *, weights_dir: str | Path | None = None, timeout: float = 600) -> None:
        self.base_url = http_address(base_url).removesuffix("/v1")
        check_seconds("timeout", timeout)
        self.weights_dir = weights_dir
        self.timeout = timeout

    def served_model(self, *, timeout: float = 10) -> str:
        """The name that the server knows its model by; one of them, where it has several for the same model.

        Args:
            timeout: Seconds that it may take.

        Raises:
            RuntimeError: The server cannot be reached, does not say, or serves several models.
        """
        remedies = {401: "it wants a key; that protects no server which takes weights, so leave its --api-key out"}
        answer = self._ask("/v1/models", None, timeout=timeout, remedies=remedies)
        try:
            cards = json.loads(answer)["data"]
            # An adapter that the server was started with is listed beside the model that it belongs to.
            roots = {str(card["id"]): card.get("root") or card["id"] for card in cards if not card.get("parent")}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self.base_url}/v1/models does not list models: {answer[:200]!r}") from error
        if len(set(roots.values())) != 1:
            raise RuntimeError(f"{self.base_url} serves {', '.join(roots) or 'nothing'}; it must be one model")
        return next(iter(roots))

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load them, and forget what was computed with the old ones. Blocks until it is done.

        Nothing may be sampled meanwhile. After a failure the server may have no weights at all, and may stop.

        Args:
            weights: All tensors by the names of the checkpoint: ``model.state_dict()``.

        Raises:
            ValueError: The output layer is missing; see ``VLLMEngine.load_weights``.
            RuntimeError: The server cannot be reached, refused, or failed.
            OSError: The weights cannot be written.
        """
        with saved_weights(weights, self.weights_dir) as folder:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            remedies = {**_DEV_MODE, 500: f"can it read {folder} (weights_dir), and is its model the same one?"}
            self._ask("/collective_rpc", body, timeout=self.timeout, remedies=remedies)
        answer = self._ask("/reset_prefix_cache", {}, timeout=self.timeout, remedies=_DEV_MODE)
        if json.loads(answer or b"{}").get("success") is False:  # vLLM before 0.26 says nothing
            raise RuntimeError(f"{self.base_url} did not forget its prefix cache, which belongs to the old weights")

    def _ask(self, path: str, body: dict[str, Any] | None, *, timeout: float, remedies: Mapping[int, str]) -> bytes:
        """GET, or POST if there is a body. The remedies are for answers other than 200."""
        url = self.base_url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - it is http(s)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            remedy = f"; {remedies[error.code]}" if error.code in remedies else ""
            raise RuntimeError(f"{url} answered {error.code}: {error.read()[:500]!r}{remedy}") from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error


@contextmanager
def saved_weights(weights: Mapping[str, Any], parent: str | Path | None) -> Iterator[str]:
    """A folder with the weights as a checkpoint, for as long as this lasts.

    Raises:
        ValueError: See ``refuse_without_output_layer``.
        OSError: They cannot be written.
    """
    import safetensors.torch

    refuse_without_output_layer(weights)
    with tempfile.TemporaryDirectory(dir=parent, prefix="weights-") as name:
        folder = os.path.abspath(name)  # the server may have been started elsewhere
        # Copies, since safetensors refuses tensors that share memory, as tied ones do.
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
        try:
            safetensors.torch.save_file(copies, Path(folder) / "model.safetensors")
        except safetensors.SafetensorError as error:
            raise OSError(f"the weights cannot be written to {folder}: {error}") from error
        yield folder


def refuse_without_output_layer(weights: Mapping[str, Any]) -> None:
    """Refuse weights that would leave vLLM's output layer as it was.

    Raises:
        ValueError: There is an embedding, but no output layer that may share its weights.
    """
    if any(name.endswith("embed_tokens.weight") for name in weights) and not any(
        name.endswith("lm_head.weight") for name in weights
    ):
        raise ValueError(
            "the weights lack lm_head.weight. It may share the embedding's weights in the trained model, but vLLM may "
            "hold a copy that would stay as it was: pass model.state_dict(), which has it"
        )

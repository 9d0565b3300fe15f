"""New weights for a vLLM server, through a folder that trainer and server can both read."""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["VLLMServerWeights", "refuse_without_output_layer", "saved_weights"]


class VLLMServerWeights:
    """Replaces the weights of a running vLLM server by a trainer's.

    The server must run with ``VLLM_SERVER_DEV_MODE=1`` in its environment, without which it takes no weights, and its
    port must be out of reach for everyone else.

    Args:
        base_url: Where the server is, such as ``http://127.0.0.1:8000``; an ending ``/v1`` does not matter.
        weights_dir: A folder that the server can read, under the same path; None takes this machine's for temporary
            files. Put it on a shared file system when the server is on another machine, or in ``/dev/shm`` for speed.
        timeout: Seconds that one request to the server may take.
    """

    def __init__(self, base_url: str, *, weights_dir: str | Path | None = None, timeout: float = 600) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.weights_dir = weights_dir
        self.timeout = timeout

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load them, and forget what was computed with the old ones. Blocks until it is done.

        Nothing may be sampled meanwhile.

        Args:
            weights: All tensors by the names of the checkpoint: ``model.state_dict()``.

        Raises:
            ValueError: The output layer is missing; see ``VLLMEngine.load_weights``.
            RuntimeError: The server cannot be reached, refused, or failed.
        """
        with saved_weights(weights, self.weights_dir) as folder:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        answer = self._post("/reset_prefix_cache", {})
        if json.loads(answer or b"{}").get("success") is False:  # vLLM before 0.26 says nothing
            raise RuntimeError(f"{self.base_url} did not forget its prefix cache, which belongs to the old weights")

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        request = urllib.request.Request(  # noqa: S310 - the address is the caller's own
            self.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:  # noqa: S310
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            hint = "; start the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
            raise RuntimeError(f"{self.base_url}{path} answered {error.code}{hint}: {error.read()[:500]!r}") from error
        except OSError as error:
            raise RuntimeError(f"{self.base_url}{path} cannot be reached: {error}") from error


@contextmanager
def saved_weights(weights: Mapping[str, Any], parent: str | Path | None) -> Iterator[str]:
    """A folder with the weights as a checkpoint, for as long as this lasts.

    Raises:
        ValueError: See ``refuse_without_output_layer``.
    """
    import safetensors.torch

    refuse_without_output_layer(weights)
    with tempfile.TemporaryDirectory(dir=parent, prefix="weights-") as folder:
        # Copies, since safetensors refuses tensors that share memory, as tied ones do.
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
        safetensors.torch.save_file(copies, Path(folder) / "model.safetensors")
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

"""What the package offers, and what it costs to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import schedulers

_ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_once_and_in_order() -> None:
    names = schedulers.__all__
    assert names == sorted(set(names))
    assert all(hasattr(schedulers, name) for name in names)


def test_names_that_users_know() -> None:
    """The names that the design fixes."""
    fixed = {
        "ChatCompletionResponse",
        "ChatCompletionResponseChoice",
        "ChatMessage",
        "Env",
        "GYMScheduler",
        "MultiTurnScheduler",
        "OpenEnvScheduler",
        "RequestConfig",
        "RolloutInferRequest",
        "RolloutOutput",
        "RolloutScheduler",
        "StopReason",
        "TextArenaScheduler",
        "envs",
        "multi_turns",
    }
    assert fixed <= set(schedulers.__all__)


def test_registry_holds_schedulers() -> None:
    assert all(issubclass(scheduler, schedulers.RolloutScheduler) for scheduler in schedulers.multi_turns.values())


def test_import_needs_nothing_but_websockets() -> None:
    """Neither frameworks nor what only some extra brings: each of them is made impossible to import."""
    heavy = ["torch", "transformers", "trl", "vllm", "openenv", "textarena", "datasets", "numpy", "tqdm", "typer"]
    hidden = [*heavy, "typing_extensions", "pydantic", "jinja2"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({hidden!r}))
import openenv_client, openenv_client.testing, schedulers, schedulers.engines, schedulers.recording
import examples.registry
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_ROOT)

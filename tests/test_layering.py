"""Dependencies point one way: examples -> schedulers -> openenv_client -> websockets; only examples start a server."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import openenv_client
import schedulers

ROOT = Path(__file__).parents[1]
UNWANTED = ["torch", "vllm", "transformers", "openenv", "textarena", "trl", "pytest"]
OURS = ["examples", "schedulers", "openenv_client", "server_scripts"]


def imports(path: Path) -> Iterator[str]:
    """The top-level packages that a file imports, wherever in it; relative imports are of its own package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0] if node.level == 0 else path.relative_to(ROOT).parts[0]


def imported_by(package: str) -> dict[str, set[str]]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return {str(path.relative_to(ROOT)): set(imports(path)) for path in files}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("openenv_client", {"openenv_client"}),
        ("schedulers", {"schedulers", "openenv_client"}),
        ("examples", {"examples", "schedulers", "openenv_client", "server_scripts"}),
        ("server_scripts", {"server_scripts"}),
    ],
)
def test_a_package_imports_only_what_is_below_it(package: str, allowed: set[str]) -> None:
    for path, names in imported_by(package).items():
        assert names & set(OURS) <= allowed, path


def test_the_client_needs_websockets_and_nothing_else() -> None:
    for path, names in imported_by("openenv_client").items():
        # typing_extensions is imported for the type checker only.
        others = names - set(sys.stdlib_module_names) - {"openenv_client", "typing_extensions"}
        assert others <= {"websockets"}, path


@pytest.mark.parametrize("package", ["openenv_client", "openenv_client.testing", "schedulers"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    code = f"import sys, {package}; print(*[name for name in {UNWANTED} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_public_names_of_the_client_are_these() -> None:
    assert openenv_client.__all__ == [
        "ConfigurationError",
        "ConnectError",
        "EnvironmentFailedError",
        "EpisodeOverError",
        "ForkError",
        "KeepaliveError",
        "MessageTooBigError",
        "NotResetError",
        "OpenEnvError",
        "OpenEnvWrapper",
        "ProtocolError",
        "Recovery",
        "RecoveryError",
        "RequestError",
        "ResetResult",
        "ServerFullError",
        "SessionAbortedError",
        "SessionFailedError",
        "SessionLost",
        "StepResult",
        "StepTimeoutError",
        "UsageError",
        "WrapperClosedError",
    ]


def test_the_public_names_of_the_schedulers_are_these() -> None:
    assert schedulers.__all__ == [
        "ChatCompletionResponse",
        "ChatCompletionResponseChoice",
        "ChatMessage",
        "Env",
        "EnvError",
        "Episode",
        "GYMScheduler",
        "InferEngine",
        "MathTipsScheduler",
        "Message",
        "Messages",
        "MultiTurnScheduler",
        "OpenEnvScheduler",
        "RequestConfig",
        "RolloutError",
        "RolloutInferRequest",
        "RolloutOutput",
        "RolloutScheduler",
        "Start",
        "StopReason",
        "TextArenaGame",
        "TextArenaScheduler",
        "ThinkingModelTipsScheduler",
        "Tokenizer",
        "Transition",
        "Turn",
        "envs",
        "multi_turns",
        "rollout_fn_of",
        "run_multi_turn",
        "start_multi_turn",
    ]


@pytest.mark.parametrize("package", ["openenv_client", "openenv_client.errors", "openenv_client.testing", "schedulers"])
def test_every_public_name_exists_and_is_listed_once_in_order(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(set(module.__all__)) == list(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)

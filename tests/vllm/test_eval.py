"""``openenv-rollout eval`` with vLLM, in its own process and on a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv_client.testing import MockEnvServer
from schedulers.recording import read_trajectories
from tests.examples.sudoku.games import seeded
from tests.schedulers.exactness import furthest_from_forward
from tests.vllm.models import OPTIONS, recorded

ROOT = Path(__file__).parents[2]
Policy = tuple[Path, Any, Any]


@pytest.mark.parametrize(("engine", "exact"), [("vllm", True), ("openai", True), ("openai", False)])
def test_every_game_is_recorded_as_it_was_sampled(
    engine: str, exact: bool, bpe_policy: Policy, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the ids and log-probabilities of vLLM; without a tokenizer, which a server does not need, with none."""
    folder, model, _ = bpe_policy
    if engine == "vllm":
        name, options = str(folder), {"dtype": "float32", "options": json.dumps(OPTIONS)}
    else:
        name, options = "policy", {"base_url": request.getfixturevalue("vllm_server")}
    if engine == "openai" and exact:
        options["tokenizer"] = str(folder)
    with MockEnvServer(seeded(3), capacity=16) as server:
        command = ["--base-url", server.base_url, "--scheduler", "examples.sudoku.scheduler:SudokuScheduler"]
        command += ["--engine", engine, "--model", name, "--games", "8", "--max-tokens", "16", "--max-turns", "3"]
        for option, value in options.items():
            command += ["--engine-option", f"{option}={value}"]
        done = subprocess.run(
            [sys.executable, "-m", "schedulers.cli", "eval", *command, "--output", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [recorded(record) for record in read_trajectories(tmp_path / "trajectories.jsonl")]
    assert len(outputs) == 8
    if exact:
        assert max(furthest_from_forward(model, output) for output in outputs) < 1e-4
    else:
        assert {(output.completion_token_ids, output.completion_logprobs) for output in outputs} == {(None, None)}

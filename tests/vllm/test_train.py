"""The train command samples from vLLM, in its own process or on a server, with the weights of every step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from examples.train_grpo import app
from openenv_client.testing import MockEnvServer
from schedulers import RolloutOutput
from schedulers.engines.vllm_server import VLLMServerWeights
from schedulers.recording import read_trajectories
from schedulers.trainers import trl
from tests.examples.sudoku.games import seeded
from tests.schedulers.exactness import furthest_from_forward
from tests.vllm.models import by_place, changed, recorded

ROOT = Path(__file__).parents[2]
Policy = tuple[Path, Any, Any]
IN_A_PROCESS_OF_ITS_OWN = """
import sys
from examples.train_grpo import app
from schedulers.trainers import trl
from tests.vllm.models import by_place

trl.reward_functions = lambda *components: [by_place for _ in components]
app(sys.argv[1:])
"""


@pytest.fixture
def environment() -> Iterator[MockEnvServer]:
    with MockEnvServer(seeded(3), capacity=16) as server:
        yield server


def options(policy: Policy, environment: MockEnvServer, folder: Path, *more: str) -> list[str]:
    """Three steps at most, with a rate so large that old weights show, and a checkpoint of each."""
    given = ["--model", str(policy[0]), "--base-url", environment.base_url, "--output-dir", str(folder)]
    given += ["--prompts-per-step", "1", "--num-generations", "8", "--max-turns", "2", "--max-new-tokens", "16"]
    given += ["--learning-rate", "2e-3", "--eval-games", "0", "--save-steps", "1", "--grpo", "save_total_limit=9"]
    return [*given, *more]


def assert_in_step(run: Path, policy: Policy) -> None:
    """Every batch was sampled with the weights that the step began with."""
    played: dict[int, list[RolloutOutput]] = {}
    for record in read_trajectories(run / "trajectories.jsonl"):
        played.setdefault(record["step"], []).append(recorded(record))
    assert [len(played[step]) for step in (1, 2, 3)] == [8, 8, 8]
    first = policy[1]
    assert furthest(first, played[1]) < 1e-4
    for step in (2, 3):
        assert furthest(checkpoint(run / f"checkpoint-{step - 1}", policy[0]), played[step]) < 1e-4
        assert furthest(first, played[step]) > 1e-3  # old weights would have shown


def furthest(model: Any, outputs: list[RolloutOutput]) -> float:
    return max(furthest_from_forward(model.eval(), output) for output in outputs)


def checkpoint(folder: Path, policy: Path) -> Any:
    """The model of a checkpoint, an adapter merged into it."""
    if not (folder / "adapter_config.json").exists():
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(policy)
    return peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()


def test_vllm_in_the_same_process_is_in_step(environment: MockEnvServer, bpe_policy: Policy, tmp_path: Path) -> None:
    given = ["--use-vllm", "--vllm", f"kv_cache_memory_bytes={2**28}", "--steps", "3"]
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, *options(bpe_policy, environment, tmp_path, *given)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_in_step(tmp_path, bpe_policy)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_server_is_in_step(
    adapter: bool,
    environment: MockEnvServer,
    vllm_server: str,
    bpe_policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in the first step after --resume, whatever it has been given meanwhile."""
    monkeypatch.setattr(trl, "reward_functions", lambda *components: [by_place for _ in components])
    run = tmp_path / "run"
    given = ["--vllm-server", vllm_server, *(["--lora"] if adapter else [])]
    assert not app(options(bpe_policy, environment, run, *given, "--steps", "2"), standalone_mode=False)
    VLLMServerWeights(vllm_server).load_weights(changed(bpe_policy[1], 1).state_dict())
    given += ["--use-vllm", "--vllm-weights-dir", str(tmp_path), "--resume"]
    assert not app(options(bpe_policy, environment, run, *given, "--steps", "3"), standalone_mode=False)
    assert_in_step(run, bpe_policy)

"""GRPO with TRL, rollouts by vLLM: what samples is, after every step, the model that is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from trl import GRPOConfig, GRPOTrainer

from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.testing import MockEnvServer
from schedulers.engines.vllm import VLLMEngine
from schedulers.trainers.trl import TRLRollout, trl_dataset
from schedulers.types import RolloutOutput
from tests.examples.sudoku.games import seeded
from tests.schedulers.exactness import furthest_from_forward
from tests.vllm.models import POLICY, by_place

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change, says TRL


@pytest.fixture(scope="module")
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(seeded(3), capacity=16) as server:
        yield server


def differences(
    engine: VLLMEngine, model: Any, base_url: str, folder: Path, *, steps: int = 3, peft_config: Any = None
) -> tuple[list[float], list[float]]:
    """Train, and compare each batch with forward passes of the model trained and of the model as it was at first."""
    now: list[float] = []
    first: list[float] = []
    original = type(model)(model.config)
    original.load_state_dict(model.state_dict())
    original.eval()

    def compare(rows: list[dict[str, Any]], outputs: list[RolloutOutput], step: int) -> None:
        training = trainer.model.training
        now.append(max(furthest_from_forward(trainer.model.eval(), output) for output in outputs))
        first.append(max(furthest_from_forward(original, output) for output in outputs))
        trainer.model.train(training)

    with TRLRollout(
        lambda e: SudokuScheduler(e, max_turns=3, max_concurrent_envs=8),
        max_new_tokens=16,
        make_engine=lambda trainer: engine,
        on_batch=compare,
    ) as rollout:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                str(folder), use_cpu=True, bf16=False, report_to="none", max_steps=steps, learning_rate=1e-2,
                per_device_train_batch_size=8, num_generations=4, max_completion_length=4096,
                gradient_checkpointing=False, save_strategy="no", disable_tqdm=True, scale_rewards="none",
            ),
            reward_funcs=by_place,
            train_dataset=trl_dataset(
                [{"env_config": {"name": "openenv", "reset_kwargs": {"seed": seed}}} for seed in range(4)],
                env_config={"base_url": base_url},
            ),
            processing_class=engine.tokenizer,
            rollout_func=rollout,
            peft_config=peft_config,
        )  # fmt: skip
        trainer.train()
    return now, first


def assert_in_step(now: list[float], first: list[float]) -> None:
    assert len(now) == 3
    assert max(now) < 1e-4
    assert min(first[1:]) > 1e-2  # the model has changed, so old weights would have shown


def test_a_tied_model_is_in_step(
    engine: VLLMEngine, bpe_policy: tuple[Path, Any, Any], server: MockEnvServer, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(bpe_policy[0])
    try:
        assert_in_step(*differences(engine, model, server.base_url, tmp_path))
        assert model.lm_head.weight is model.model.embed_tokens.weight
    finally:
        engine.load_weights(bpe_policy[1].state_dict())


def test_the_embedded_policy_is_in_step(policy_engine: VLLMEngine, server: MockEnvServer, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    original = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        assert_in_step(*differences(policy_engine, model, server.base_url, tmp_path))
    finally:
        policy_engine.load_weights(original)


def test_an_adapter_is_in_step(policy_engine: VLLMEngine, server: MockEnvServer, tmp_path: Path) -> None:
    """VLLM gets it merged into the weights; the trainer keeps it apart."""
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    original = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        assert_in_step(*differences(policy_engine, model, server.base_url, tmp_path, peft_config=config))
    finally:
        policy_engine.load_weights(original)

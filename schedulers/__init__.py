"""Multi-turn rollouts in OpenEnv environments for reinforcement learning."""

from __future__ import annotations

from schedulers.engines.base import InferEngine, Tokenizer
from schedulers.episode import Episode, Turn
from schedulers.gym import Env, GYMScheduler, Start, Transition, envs
from schedulers.lockstep import rollout_fn_of, run_multi_turn, start_multi_turn
from schedulers.multi_turn import EnvError, MultiTurnScheduler, RolloutError, RolloutScheduler
from schedulers.openenv import OpenEnvScheduler
from schedulers.textarena import TextArenaGame, TextArenaScheduler
from schedulers.tips import MathTipsScheduler, ThinkingModelTipsScheduler
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Message,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
)

__all__ = [
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

multi_turns: dict[str, type[RolloutScheduler]] = {
    "gym_scheduler": GYMScheduler,
    "openenv_scheduler": OpenEnvScheduler,
    "textarena_scheduler": TextArenaScheduler,
    "math_tip_trick": MathTipsScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
}
"""Schedulers by name. A plugin adds its own: ``multi_turns["my_scheduler"] = MyScheduler``."""

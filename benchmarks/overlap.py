"""How much is won when a game that waits for its environment holds up no other one: both ways, in one run.

Two ways to play the same games: batch by batch, where every turn waits for the slowest environment, and each game at
its own pace. ``python benchmarks/overlap.py --engine vllm`` where vLLM is.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

if not __package__:  # run as a script: make the checkout importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from schedulers import Env, GYMScheduler, RequestConfig, RolloutInferRequest, RolloutOutput, envs, run_multi_turn
from schedulers.engines import InferEngine
from schedulers.lockstep import rollout_fn_of
from schedulers.types import Messages

POLICY = Path(__file__).resolve().parents[1] / "examples" / "sudoku" / "policy"


class Delays(Env):
    """Answers after a time that follows from the row: most at once, some late, as servers do."""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Start."""
        self._delays = list(self.env_config["delays"])
        return "Say a move.", {}, ""

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Wait, and ask for more until no delay is left."""
        await asyncio.sleep(self._delays.pop(0))
        return "Say a move.", 0.0, not self._delays, {}

    async def close(self) -> None:
        """There is nothing to close."""


class WholeGames(GYMScheduler):
    """Goes on after a completion that was cut, so that all games have the same number of turns."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """Only the environment ends a game."""
        return False


def main(
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    games: Annotated[int, typer.Option(min=1, help="Games side by side.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a game.")] = 8,
    delay: Annotated[float, typer.Option(min=0, help="Mean seconds of an environment's answer.")] = 0.2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a turn.")] = 16,
) -> None:
    """Measure both ways and print the ratio."""
    envs["delays"] = Delays
    sampler = make_engine(engine)
    rng = random.Random(0)
    rows = [
        {"env_config": {"name": "delays", "delays": [delay * rng.expovariate(1) for _ in range(turns)]}}
        for _ in range(games)
    ]
    config = RequestConfig(max_tokens=max_tokens)
    play_at_own_pace(sampler, rows[:2], config)  # what is only done once
    batch_by_batch = measure("batch by batch", lambda: play_batch_by_batch(sampler, rows, config))
    own_pace = measure("each at its own pace", lambda: play_at_own_pace(sampler, rows, config))
    print(f"ratio {batch_by_batch / own_pace:.2f}")


def make_engine(name: str) -> Any:
    """An engine with the embedded policy."""
    if name not in ("transformers", "vllm"):
        raise typer.BadParameter(f"{name!r}: it takes transformers or vllm", param_hint="'--engine'")
    if name == "vllm":
        from schedulers.engines.vllm import VLLMEngine

        return VLLMEngine.from_pretrained(POLICY, options={"enforce_eager": True, "kv_cache_memory_bytes": 2**28})
    from schedulers.engines.transformers import TransformersEngine

    return TransformersEngine.from_pretrained(POLICY)


def measure(name: str, play: Callable[[], Sequence[RolloutOutput]]) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    outputs = play()
    seconds = time.perf_counter() - started
    tokens = sum(sum(output.completion_mask or ()) for output in outputs)
    print(f"{name:22} {seconds:6.1f} s   {len(outputs)} games   {tokens / seconds:6.0f} tokens/s")
    return seconds


def play_batch_by_batch(
    engine: InferEngine, rows: Sequence[dict[str, Any]], config: RequestConfig
) -> list[RolloutOutput]:
    """All games take a turn, then all of them the next."""
    scheduler = WholeGames(tokenizer=engine.tokenizer)
    return run_multi_turn(
        [RolloutInferRequest.from_row(r) for r in rows], None, scheduler, rollout_fn_of(engine), config
    )


def play_at_own_pace(engine: InferEngine, rows: Sequence[dict[str, Any]], config: RequestConfig) -> list[RolloutOutput]:
    """Each game samples its next turn as soon as its environment has answered."""
    return asyncio.run(WholeGames(engine).async_infer(rows, config, use_tqdm=False))


if __name__ == "__main__":
    typer.run(main)

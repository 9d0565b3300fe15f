"""TextArenaScheduler and TextArenaGame: what all TextArena games share. A new game is a subclass of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from openenv_client import StepResult
from schedulers.checks import as_dict, check_number
from schedulers.engines.base import InferEngine
from schedulers.episode import Episode
from schedulers.gym import Start, Transition, fingerprint
from schedulers.names import did_you_mean
from schedulers.openenv import OpenEnvOptions, OpenEnvScheduler
from schedulers.thinking import visible_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["TextArenaGame", "TextArenaScheduler"]

_BRACKETED = re.compile(r"\[[^\[\]\n]+\]")


class TextArenaGame:
    """One game as the model meets it: what it reads, and what its moves were worth. Pure: no I/O.

    This class plays any TextArena game with the environment's own texts and reward. A subclass for one game overrides
    what it wants to do better, ``prompt`` and ``rewards`` as a rule.

    Args:
        observation: The environment's first observation.

    Attributes:
        system_prompt: Rules and answer format, the system message of every trajectory.
        reminder: What the model reads after an answer without a move.
        reward_names: The components that ``rewards`` returns, in order.
    """

    system_prompt: ClassVar[str] = ""
    reminder: ClassVar[str] = "No move was found in that answer. Answer with one move in square brackets."
    reward_names: ClassVar[tuple[str, ...]] = ("environment_reward",)

    def __init__(self, observation: dict[str, Any]) -> None:
        self.environment_reward = 0.0
        self.new_text = self._first_text = self._last_text = observation_text(observation)

    @property
    def fingerprint(self) -> str:
        """Tells whether two trajectories began with the same game.

        By default a hash of the first text, which tells nothing about what a game keeps hidden.
        """
        return fingerprint(self._first_text)

    @property
    def max_turns(self) -> int | None:
        """The turn limit of this game when the scheduler sets none."""
        return None

    def prompt(self) -> str:
        """What the model reads next."""
        return self.new_text

    def record(self, text: str, action: dict[str, Any] | None, result: StepResult | None) -> None:
        """Take in what a turn did.

        Args:
            text: The model's answer.
            action: The move that was sent; None when the answer held none.
            result: The environment's answer; None in the same case.
        """
        if result is None:
            self.new_text = self.reminder
            return
        self.environment_reward += result.reward
        shown = observation_text(result.observation)
        # Some servers repeat the whole history in every observation; the model has read that already.
        grown = shown.startswith(self._first_text) and shown.startswith(self._last_text)
        self.new_text = (shown[len(self._last_text) :].lstrip("\n") if grown else "") or shown
        self._last_text = shown

    def rewards(self) -> dict[str, float]:
        """The components of the reward for the game so far."""
        return {"environment_reward": self.environment_reward}

    def infos(self) -> dict[str, Any]:
        """For the trajectory's record."""
        return {}


class TextArenaScheduler(OpenEnvScheduler):
    """Plays a TextArena game; ``game_class`` says which.

    What the model reads is the game's ``prompt``; ``format_observation`` has no part in it. The reward of a turn is
    what it added to the weighted sum of the game's reward components, so the step rewards sum to the total.

    Args:
        infer_engine: Samples the completions.
        max_turns: The most turns of a trajectory; None leaves it to the game.
        reward_weights: A weight by reward component; 1.0 for those that are not named.
        options: Keywords of ``OpenEnvScheduler``; ``system_message`` replaces the game's system prompt.

    Raises:
        ValueError: A weight is for no component of the game, or an extra reward has the name of one.
    """

    game_class: ClassVar[type[TextArenaGame]] = TextArenaGame

    def __init__(
        self,
        infer_engine: InferEngine | None = None,
        max_turns: int | None = None,
        *,
        reward_weights: Mapping[str, float] | None = None,
        **options: Unpack[OpenEnvOptions],
    ) -> None:
        options.setdefault("system_message", self.game_class.system_prompt)
        super().__init__(infer_engine, max_turns, **options)
        names = self.game_class.reward_names
        weights = as_dict("reward_weights", reward_weights)
        for name, weight in weights.items():
            if name not in names:
                hint = did_you_mean(name, names) or f"there are {', '.join(names)}"
                raise ValueError(f"no reward component is called {name!r}; {hint}")
            check_number(f"the weight of {name}", weight)
        for name in self.extra_rewards.keys() & set(names):
            raise ValueError(f"extra_rewards: the game has a reward {name!r} of its own; rename yours")
        self.reward_weights = dict.fromkeys(names, 1.0) | weights

    def new_game(self, observation: dict[str, Any]) -> TextArenaGame:
        """Make the game of a trajectory from its first observation."""
        return self.game_class(observation)

    def parse_action(self, text: str) -> dict[str, Any] | None:
        """The last bracketed text outside of thinking, brackets included, or None."""
        found = _BRACKETED.findall(visible_text(text))
        return {"message": found[-1]} if found else None

    def observe_reset(self, episode: Episode, observation: dict[str, Any]) -> Start:
        """Begin the game."""
        game = self.new_game(observation)
        episode.state = game
        if episode.max_turns is None:
            episode.max_turns = game.max_turns
        episode.rewards = self._rewards(game)
        return Start(game.prompt(), self.system_message, {"fingerprint": game.fingerprint})

    def observe_step(self, episode: Episode, action: dict[str, Any] | None, result: StepResult | None) -> Transition:
        """Let the game take in the turn and see what it is worth now."""
        game: TextArenaGame = episode.state
        before = self._total(episode.rewards) if episode.step_rewards else 0.0
        game.record(episode.turns[-1].text, action, result)
        episode.rewards = self._rewards(game)
        infos = {"environment_reward": game.environment_reward, **game.infos()}
        done = result is not None and result.done
        return Transition(game.prompt(), self._total(episode.rewards) - before, done, infos)

    def _rewards(self, game: TextArenaGame) -> dict[str, float]:
        rewards = game.rewards()
        if unlisted := sorted(rewards.keys() - self.reward_weights.keys()):
            raise ValueError(f"{type(game).__name__}.rewards() gives {unlisted}, which reward_names does not list")
        return rewards

    def _total(self, rewards: Mapping[str, float]) -> float:
        return sum(self.reward_weights[name] * value for name, value in rewards.items())


def observation_text(observation: Mapping[str, Any]) -> str:
    """What the game says in a TextArena observation: its messages less the player's own, or the prompt without any."""
    messages = observation.get("messages")
    if not messages:
        return str(observation.get("prompt", ""))
    return "\n".join(str(message.get("content", "")) for message in messages if message.get("sender_id", -1) < 0)

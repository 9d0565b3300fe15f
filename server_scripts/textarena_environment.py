"""The OpenEnv environment that plays one TextArena game per session."""

from __future__ import annotations

import re
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import BaseModel, Field, field_validator

from server_scripts.textarena_games import Game, GameSource

__all__ = [
    "RequestError",
    "TextArenaAction",
    "TextArenaEnvironment",
    "TextArenaMessage",
    "TextArenaObservation",
    "TextArenaState",
]

_SURROGATE = re.compile("[\ud800-\udfff]")


class RequestError(ValueError):
    """A client asked for what the environment does not do. The session and its server go on."""


class TextArenaAction(Action):
    """What the player says."""

    message: str = Field(description="The player's text, such as '[5 3 7]': put 7 into row 5, column 3")

    @field_validator("message")
    @classmethod
    def _encodable(cls, message: str) -> str:
        # JSON can carry half a surrogate pair; the game repeats the text, and then the reply could not be encoded.
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", message)


class TextArenaMessage(BaseModel):
    """One message of the game, in TextArena's own words."""

    sender_id: int = Field(description="0 is the player, -1 the game")
    content: str
    category: str = Field(
        description="PROMPT, PLAYER_ACTION, GAME_BOARD, GAME_MESSAGE, GAME_ACTION_DESCRIPTION, GAME_ADMIN"
    )


class TextArenaObservation(Observation):
    """What the player sees after a reset or a step.

    The reward beside it is 0.0 until the game is over. Then it is 1.0 for a win; a lost Sudoku pays the share of the
    empty cells that were filled. So a positive reward is not a win; `solved` is.
    """

    prompt: str = Field(default="", description="The rules of the game; empty after the first observation")
    messages: list[TextArenaMessage] = Field(
        default_factory=list, description="Only what is new since the last observation, the player's own text included"
    )
    board: list[list[int]] | None = Field(
        default=None, description="Sudoku: 9 rows of 9 numbers, 0 for an empty cell; null for other games"
    )
    solved: bool = Field(default=False, description="Whether the game was won")
    refused: str | None = Field(
        default=None, description="Why the last move was refused, also if that lost the game; null if it was accepted"
    )
    info: dict[str, Any] = Field(
        default_factory=dict,
        description="env_id; turn: the number of steps so far; reason: why the game ended, null before",
    )


class TextArenaState(State):
    """Where an episode stands. Holds nothing that the player may not know."""

    env_id: str = ""
    seed: int | None = None
    done: bool = False
    solved: bool = False


class TextArenaEnvironment(Environment[TextArenaAction, TextArenaObservation, TextArenaState]):
    """Plays games of one source, one at a time.

    Args:
        source: Makes the games; shared by all sessions of a server.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, source: GameSource) -> None:
        super().__init__()
        self._source = source
        self._game: Game | None = None
        self._state = TextArenaState(env_id=source.env_id)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TextArenaObservation:
        """Start a fresh game.

        Args:
            seed: A whole number from 0; the same one gives the same game. None gives a new one every time.
            episode_id: Comes back in `state`.
            **kwargs: None are known. Taken because the framework drops silently what a signature does not name.

        Raises:
            RequestError: A setting is unknown or has a bad value.
        """
        self._game = None  # whatever goes wrong from here, no step may land in the old game
        self._state = TextArenaState(env_id=self._source.env_id)
        for name in kwargs:
            raise RequestError(f"Unknown reset setting {name!r}: this environment takes seed and episode_id.")
        if seed is not None and (type(seed) is not int or seed < 0):
            raise RequestError(
                f"seed is {seed!r}: it must be a whole number from 0, or null for a new game every time."
            )
        if episode_id is not None and not isinstance(episode_id, str):
            raise RequestError(f"episode_id is {episode_id!r}: it must be text or null.")
        game = self._source.new_game(seed)
        self._game = game
        self._state = TextArenaState(env_id=self._source.env_id, episode_id=episode_id, seed=seed)
        return self._observe(game, first=True)

    def step(self, action: TextArenaAction, timeout_s: float | None = None, **kwargs: Any) -> TextArenaObservation:
        """Say `action.message` in the running game.

        Args:
            action: What the player says.
            timeout_s: Not used: a step takes less than a millisecond.
            **kwargs: Not used.

        Raises:
            RequestError: No game is running.
        """
        game = self._game
        if game is None:
            raise RequestError("No game is running: call reset before step.")
        if game.done:
            raise RequestError("The game is over: call reset for a new one.")
        game.step(action.message)
        # Replaced, not changed: the framework reads `state` on another thread than this one.
        self._state = self._state.model_copy(
            update={"step_count": self._state.step_count + 1, "done": game.done, "solved": game.solved}
        )
        return self._observe(game)

    def _observe(self, game: Game, *, first: bool = False) -> TextArenaObservation:
        messages = game.take_messages()
        return TextArenaObservation(
            done=game.done,
            reward=game.reward,
            prompt="\n".join(message.content for message in messages if message.category == "PROMPT") if first else "",
            messages=[
                TextArenaMessage(sender_id=message.sender_id, content=message.content, category=message.category)
                for message in messages
            ],
            board=game.board,
            solved=game.solved,
            refused=game.refused,
            info={"env_id": self._source.env_id, "turn": self._state.step_count, "reason": game.reason},
        )

    @property
    def state(self) -> TextArenaState:
        """Where the episode stands."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Say what is played here."""
        return EnvironmentMetadata(name=self._source.env_id, description=f"{self._source.env_id}, a game of TextArena")

    def close(self) -> None:
        """Forget the game."""
        self._game = None

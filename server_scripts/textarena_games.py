"""TextArena games of one player, each with random numbers of its own and made only once for each seed.

TextArena seeds and draws from Python's process-wide generator. That does not keep a seed in a server, where other
sessions and even the keepalive of the web server draw from the same generator while a puzzle is being made; a lock
would not stop them. So the modules of TextArena get a stand-in for ``random`` that draws from the generator of the game
being played. The puzzles stay those that TextArena makes from the same seed, and the process's own state is left alone.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import random
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import textarena
from textarena.envs.registration import ENV_REGISTRY
from textarena.envs.Sudoku.env import SudokuEnv

__all__ = ["Game", "GameError", "GameMessage", "GameSource"]


class GameError(ValueError):
    """A game cannot be served as asked.

    Attributes:
        setting: The setting that is to blame: ``"env_id"`` or the name of one of the game's own settings.
    """

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


@dataclass(frozen=True)
class GameMessage:
    """One message of a game in TextArena's own words.

    Attributes:
        sender_id: 0 is the player, -1 the game.
        content: The text.
        category: The name of TextArena's ``ObservationType``, such as ``"GAME_BOARD"``.
    """

    sender_id: int
    content: str
    category: str


class _GameRandom(random.Random):
    """Stands in for the module ``random``: every thread draws from the generator of the game that it is playing.

    A thread that is playing none draws from the process-wide generator, as TextArena does by itself.
    """

    Random = random.Random  # some games make a generator of their own with ``random.Random(seed)``

    def __init__(self) -> None:
        self._playing = threading.local()  # and no super().__init__(), which would seed

    def __deepcopy__(self, memo: dict[int, Any]) -> _GameRandom:
        return self  # a game may keep one of the methods, and is copied with it

    @contextmanager
    def drawing_from(self, generator: random.Random) -> Iterator[None]:
        """Make this thread draw from `generator` inside the block."""
        self._playing.generator = generator
        try:
            yield
        finally:
            del self._playing.generator

    def _generator(self) -> Any:
        return getattr(self._playing, "generator", random)

    # All that random.Random keeps a state for; its other methods draw by these.

    def seed(self, a: Any = None, version: int = 2) -> None:
        self._generator().seed(a, version)

    def random(self) -> float:
        return float(self._generator().random())

    def getrandbits(self, k: int, /) -> int:
        return int(self._generator().getrandbits(k))

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return float(self._generator().gauss(mu, sigma))


_RANDOM = _GameRandom()


def _replace_random() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena.") and getattr(module, "random", None) is random:
            vars(module)["random"] = _RANDOM


class Game:
    """One game from its first board to its end. Not thread-safe: one thread at a time may play it.

    Args:
        env: What ``textarena.make`` gave, already reset.
        generator: Where the game draws its random numbers from.

    Attributes:
        refused: Why the last move was refused, in TextArena's words; None if it was accepted.
    """

    def __init__(self, env: Any, generator: random.Random) -> None:
        self.refused: str | None = None
        self._env = env
        self._generator = generator
        # The wrappers around the core change what the player says (brackets are added) and retell the whole history in
        # every observation. Moves go through them, observations are taken from the core.
        self._core = env
        while isinstance(self._core, textarena.Wrapper):
            self._core = self._core.env
        self._state = self._core.state
        self._note_refusals()

    def _note_refusals(self) -> None:
        # A refusal that loses the game leaves no message, so the reason is taken where the game states it.
        set_invalid_move = self._state.set_invalid_move

        def note(reason: str | None, reward: float = -1.0) -> None:
            self.refused = reason or "Invalid move."
            set_invalid_move(reason=reason, reward=reward)

        self._state.set_invalid_move = note

    def step(self, message: str) -> None:
        """Play `message`, the player's whole text."""
        self.refused = None
        with _RANDOM.drawing_from(self._generator):
            self._env.step(message)

    def take_messages(self) -> list[GameMessage]:
        """Give the messages since the last call, the player's own among them."""
        with _RANDOM.drawing_from(self._generator):
            _, messages = self._core.get_observation()
        self._state.logs.clear()  # nobody reads it, and it would keep all that was ever said
        return [GameMessage(sender, content, category.name) for sender, content, category in messages]

    @property
    def done(self) -> bool:
        """Whether the game is over."""
        return bool(self._state.done)

    @property
    def reward(self) -> float:
        """What TextArena pays: 0.0 until the end, then 1.0 for a win; in many games a lost one pays the share done."""
        return float(self._state.rewards[0]) if self.done and self._state.rewards else 0.0

    @property
    def solved(self) -> bool:
        """Whether the game was won."""
        return self.reward >= 1.0

    @property
    def reason(self) -> str | None:
        """Why the game ended, in TextArena's words; None before."""
        return self._state.game_info[0].get("reason") if self.done else None

    @property
    def board(self) -> list[list[int]] | None:
        """The rows of a Sudoku, 9 times 9 numbers with 0 for an empty cell; None for every other game."""
        if not isinstance(self._core, SudokuEnv):
            return None
        return [list(row) for row in self._state.game_state["board"]]


class GameSource:
    """Makes games of one kind. Thread-safe.

    Args:
        env_id: TextArena's id, such as ``"Sudoku-v0-easy"``. The variants of an id differ here only in what they do to
            the player's text: ``-raw`` takes it as it is, the others put brackets around text that has none.
        settings: Arguments of the game's class that replace those of the id, such as ``{"clues": 40}`` for Sudoku.
        cache_size: How many seeds' games are kept. The members of a training group ask for the same one, and making a
            hard Sudoku takes seconds.

    Raises:
        GameError: The id is unknown, the game has no such setting, needs more players, or needs what is not installed.
    """

    def __init__(self, env_id: str, *, settings: Mapping[str, int] | None = None, cache_size: int = 256) -> None:
        self.env_id = env_id
        self.settings = dict(settings or {})
        self._check_settings(self._load_class())
        _replace_random()
        self._cache: OrderedDict[int, tuple[Any, random.Random]] = OrderedDict()
        self._cache_size = cache_size
        self._cache_lock = threading.Lock()
        # One at a time: a group that asks for the same seed at once makes it once, and as the work is all in Python,
        # two games made at a time would both take twice as long, and thirty leave the server no time to answer anybody.
        self._making = threading.Lock()
        self._check_playable()

    def new_game(self, seed: int | None = None) -> Game:
        """Make a fresh game.

        Args:
            seed: The same seed gives the same game, here as in TextArena itself. None gives a new one every time.
        """
        if seed is None:
            with self._making:
                return Game(*self._make(secrets.randbits(64)))
        made = self._cached(seed)
        if made is None:
            with self._making:
                made = self._cached(seed)
                if made is None:
                    made = self._make(seed)
                    self._keep(seed, made)
        return Game(*copy.deepcopy(made))

    def _make(self, seed: int) -> tuple[Any, random.Random]:
        generator = random.Random(seed)
        with _RANDOM.drawing_from(generator):
            env = textarena.make(self.env_id, **self.settings)
            env.reset(num_players=1, seed=seed)
        return env, generator

    def _cached(self, seed: int) -> tuple[Any, random.Random] | None:
        with self._cache_lock:
            if seed not in self._cache:
                return None
            self._cache.move_to_end(seed)
            return self._cache[seed]

    def _keep(self, seed: int, made: tuple[Any, random.Random]) -> None:
        with self._cache_lock:
            self._cache[seed] = made
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)

    def _load_class(self) -> type:
        if self.env_id not in ENV_REGISTRY:
            raise GameError("env_id", f"TextArena has no game {self.env_id!r}.{_nearest(self.env_id, ENV_REGISTRY)}")
        entry_point = ENV_REGISTRY[self.env_id].entry_point
        if not isinstance(entry_point, str):
            return cast(type, entry_point)
        module, _, name = entry_point.partition(":")
        try:
            return cast(type, getattr(importlib.import_module(module), name))
        except (ImportError, SyntaxError) as error:
            raise GameError("env_id", f"{self.env_id} cannot be loaded here: {error}") from error
        except LookupError as error:
            raise self._missing_data(error) from error

    def _check_settings(self, game_class: type) -> None:
        known = list(inspect.signature(game_class).parameters)
        for name in self.settings:
            if name not in known:
                takes = f"takes {', '.join(known)}" if known else "has no settings"
                raise GameError(name, f"{self.env_id} has no setting {name}; it {takes}.")

    def _check_playable(self) -> None:
        try:
            env, _ = self._make(seed=1)
            state = env.state
        except AssertionError as error:
            raise GameError("env_id", f"{self.env_id} is not a game of one player.") from error
        except LookupError as error:
            raise self._missing_data(error) from error
        except Exception as error:
            raise GameError("env_id", f"{self.env_id} cannot be played here: {_summary(error)}") from error
        if not isinstance(state, textarena.SinglePlayerState):
            raise GameError("env_id", f"{self.env_id} is not a game of one player.")

    def _missing_data(self, error: LookupError) -> GameError:
        # NLTK says in this way that a corpus is missing.
        message = f"{self.env_id} needs data that is not installed: {_summary(error)} See python -m nltk.downloader."
        return GameError("env_id", message)


def _nearest(env_id: str, known: Mapping[str, Any]) -> str:
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(env_id.lower(), by_lower_case, n=3, cutoff=0.5)
    return f" The nearest: {', '.join(by_lower_case[match] for match in matches)}." if matches else ""


def _summary(error: Exception) -> str:
    lines = (line.strip(" *") for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)

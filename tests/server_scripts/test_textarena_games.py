"""Games of TextArena: seeds, random numbers, the cache, and what cannot be served."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import textarena
from textarena.envs.registration import ENV_REGISTRY

from server_scripts.textarena_games import Game, GameError, GameSource

VERY_EASY = "Sudoku-v0-very-easy"

# Made by TextArena 0.7.4 itself in a fresh interpreter; 0 is an empty cell.
TEXTARENA_BOARDS = {
    (VERY_EASY, 0): "831725469/409106325/265039871/387641952/512397648/694258713/046513287/753862190/128974530",
    (VERY_EASY, 1): "683290007/421867359/705341860/572134986/846579123/319682574/038426795/964758231/257913648",
    (
        "Sudoku-v0-medium",
        7,
    ): "209360710/050071004/780040030/002080090/070629003/693050078/900005302/000800900/030296507",
}


def board_text(game: Game) -> str:
    assert game.board is not None
    return "/".join("".join(str(number) for number in row) for row in game.board)


class Tally(textarena.Env):  # type: ignore[misc]
    """A game that counts how often it was made and dislikes one word."""

    made: ClassVar[int] = 0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        type(self).made += 1
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=9)
        self.state.reset(game_state={}, player_prompt_function=self._prompt)

    def _prompt(self, player_id: int, game_state: dict[str, Any]) -> str:
        return "Say anything."

    def step(self, action: str) -> Any:
        if action == "[bad]":
            self.state.set_invalid_move(reason="No bad words.")
        return self.state.step()


@pytest.fixture
def register() -> Iterator[Callable[[type], str]]:
    """Make a class a game of TextArena for the length of a test, and give its id."""
    ids = []
    names = (f"Registered-v{number}" for number in itertools.count())

    def register(game_class: type) -> str:
        env_id = next(names)
        textarena.register(id=env_id, entry_point=game_class)
        ids.append(env_id)
        return env_id

    yield register
    for env_id in ids:
        del ENV_REGISTRY[env_id]


@pytest.mark.parametrize(("env_id", "seed"), TEXTARENA_BOARDS)
def test_a_seed_gives_the_puzzle_that_textarena_makes_of_it(env_id: str, seed: int) -> None:
    """S12: The same seed gives the same board, in every process."""
    assert board_text(GameSource(env_id).new_game(seed)) == TEXTARENA_BOARDS[env_id, seed]


def test_concurrent_resets_keep_seeds_and_the_random_state_of_the_process() -> None:
    """S13: Of 16 resets at once, those with a seed are alike, those without differ, and `random` is not touched."""
    random.seed(5)
    expected = [random.random() for _ in range(1000)]
    random.seed(5)
    drawn: list[float] = []
    for _ in range(5):
        source = GameSource("Sudoku-v0-medium")  # anew, so that the seed's puzzle is made again
        start = threading.Barrier(17)

        def make(seed: int | None, source: GameSource = source, start: threading.Barrier = start) -> str:
            start.wait()
            return board_text(source.new_game(seed))

        with ThreadPoolExecutor(16) as pool:
            boards = [pool.submit(make, seed) for seed in [7, None] * 8]
            start.wait()
            while not all(board.done() for board in boards) and len(drawn) < len(expected):
                drawn.append(random.random())  # what the process draws meanwhile, as the server's keepalive does
        assert {board.result() for board in boards[0::2]} == {TEXTARENA_BOARDS["Sudoku-v0-medium", 7]}
        assert len({board.result() for board in boards[1::2]}) == 8
    assert drawn == expected[: len(drawn)]


def test_a_seed_is_made_once_for_a_whole_group(register: Callable[[type], str]) -> None:
    """Sixteen members of a group that reset at once cause one game to be made."""

    class Once(Tally):
        made = 0

    source = GameSource(register(Once))
    Once.made = 0
    with ThreadPoolExecutor(16) as pool:
        games = list(pool.map(source.new_game, [3] * 16))
    assert Once.made == 1
    assert len({id(game) for game in games}) == 16


def test_the_cache_is_bounded_and_forgets_what_was_not_asked_for_longest(register: Callable[[type], str]) -> None:
    """With room for two seeds, the third drops the one that was asked for least recently."""

    class Bounded(Tally):
        made = 0

    source = GameSource(register(Bounded), cache_size=2)
    Bounded.made = 0
    made = []
    for seed in (1, 2, 1, 3, 1, 2):
        source.new_game(seed)
        made.append(Bounded.made)
    assert made == [1, 2, 2, 3, 3, 4]


def test_games_of_one_seed_are_separate() -> None:
    """A move in one game changes neither another of the same seed nor those made later."""
    source = GameSource(VERY_EASY)
    game, other = source.new_game(0), source.new_game(0)
    game.step("[2 2 7]")
    assert game.refused is None
    assert board_text(game) != board_text(other)
    assert board_text(other) == board_text(source.new_game(0)) == TEXTARENA_BOARDS[VERY_EASY, 0]


def test_a_game_that_draws_in_every_step_goes_on_the_same_way() -> None:
    """2048 puts tiles at random: two games of one seed stay alike though a third is played between their moves."""
    source = GameSource("2048-v0")
    first, second, other = source.new_game(7), source.new_game(7), source.new_game(8)
    for move in ("[up]", "[left]", "[down]", "[right]"):
        first.step(move)
        other.step(move)
        second.step(move)
    assert first.take_messages() == second.take_messages() != other.take_messages()


def test_a_game_leaves_the_random_state_of_the_process_alone() -> None:
    """S13: Making and playing a game that draws at random does not touch the generator of the process."""
    state = random.getstate()
    game = GameSource("2048-v0").new_game(7)
    game.step("[up]")
    assert random.getstate() == state


def test_a_game_may_make_a_generator_of_its_own() -> None:
    """Three-card monte calls `random.Random(seed)`, which the stand-in for the module has too."""
    source = GameSource("ThreeCardMonte-v0")
    assert source.new_game(3).take_messages() == source.new_game(3).take_messages()


def test_textarena_used_directly_draws_from_the_process() -> None:
    """Code that plays TextArena by itself, in the same process, seeds and draws as ever."""
    GameSource("GuessTheNumber-v0")
    random.seed(4)
    expected = random.randint(1, 20)
    state = random.getstate()
    env = textarena.make("GuessTheNumber-v0")
    env.reset(num_players=1, seed=4)
    assert env.game_number == expected
    assert random.getstate() == state


def test_the_reason_of_a_refusal_is_kept_also_when_it_loses_the_game(register: Callable[[type], str]) -> None:
    """`refused` names the reason after each bad move and nothing after a good one."""
    game = GameSource(register(Tally)).new_game(1)
    refusals = []
    for text in ("[bad]", "[good]", "[bad]", "[bad]"):
        game.step(text)
        refusals.append((game.refused, game.done))
    reason = "No bad words."
    assert refusals == [(reason, False), (None, False), (reason, False), (reason, True)]
    assert (game.reason, game.solved) == (f"Invalid Move: {reason}", False)


@pytest.mark.parametrize(
    ("env_id", "nearest"),
    [("Sudoku-v0-hrd", "Sudoku-v0-hard"), ("sudoku-v0", "Sudoku-v0"), ("Minesweeper", "Minesweeper-v0")],
)
def test_an_unknown_id_is_refused_with_the_nearest(env_id: str, nearest: str) -> None:
    with pytest.raises(GameError, match=rf"no game '{env_id}'\. The nearest: .*{nearest}") as caught:
        GameSource(env_id)
    assert caught.value.setting == "env_id"


@pytest.mark.parametrize("env_id", ["TicTacToe-v0", "QuantumTicTacToe-v0"])
def test_a_game_of_two_is_refused(env_id: str) -> None:
    with pytest.raises(GameError, match="not a game of one player"):
        GameSource(env_id)


def test_what_was_said_is_not_kept() -> None:
    """However much a player says, the game does not grow: no part of it holds the text once it was taken."""
    game = GameSource(VERY_EASY).new_game(0)
    game.take_messages()
    game.step("[2 2 7] much ado")
    assert "much ado" in game.take_messages()[0].content
    parts = [game._env, game._env.env, game._core, game._state]
    assert "much ado" not in repr([vars(part) for part in parts])


def test_a_setting_that_the_game_does_not_have_is_refused() -> None:
    with pytest.raises(GameError, match="no setting clues; it takes min_number, max_number, max_turns") as caught:
        GameSource("GuessTheNumber-v0", settings={"clues": 40})
    assert caught.value.setting == "clues"


def test_settings_replace_those_of_the_id() -> None:
    board = GameSource("Sudoku-v0", settings={"clues": 78}).new_game(0).board
    assert board is not None
    assert sum(number == 0 for row in board for number in row) == 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LookupError("\n****\n  Resource words not found.\n  more"), "not installed: Resource words not found. See"),
        (ValueError("API key not found"), "cannot be played here: API key not found"),
        (RuntimeError(), "cannot be played here: RuntimeError"),
    ],
)
def test_a_game_that_cannot_be_made_is_refused_with_its_reason(
    register: Callable[[type], str], error: Exception, message: str
) -> None:
    class Broken(Tally):
        def reset(self, num_players: int, seed: int | None = None) -> None:
            raise error

    with pytest.raises(GameError, match=message):
        GameSource(register(Broken))

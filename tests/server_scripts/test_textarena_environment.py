"""The OpenEnv environment: what it shows, what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server_scripts.textarena_environment import (
    RequestError,
    TextArenaAction,
    TextArenaEnvironment,
    TextArenaObservation,
)
from server_scripts.textarena_games import GameSource

# The six empty cells of this puzzle and what belongs there.
SEED = 0
WINNING_MOVES = ["[2 2 7]", "[2 5 8]", "[3 4 4]", "[7 1 9]", "[8 9 4]", "[9 9 6]"]
WRONG_MOVE = "[2 2 9]"


@pytest.fixture(scope="module")
def source() -> GameSource:
    return GameSource("Sudoku-v0-very-easy")


@pytest.fixture
def environment(source: GameSource) -> TextArenaEnvironment:
    return TextArenaEnvironment(source)


def play(environment: TextArenaEnvironment, *moves: str) -> TextArenaObservation:
    """Play `moves` and give the last observation."""
    for move in moves:
        observation = environment.step(TextArenaAction(message=move))
    return observation


def categories(observation: TextArenaObservation) -> list[tuple[int, str]]:
    return [(message.sender_id, message.category) for message in observation.messages]


def test_the_first_observation_has_rules_and_board(environment: TextArenaEnvironment) -> None:
    observation = environment.reset(seed=SEED)
    assert categories(observation) == [(-1, "PROMPT"), (-1, "GAME_BOARD")]
    assert observation.prompt == observation.messages[0].content
    assert "[row column number]" in observation.prompt
    assert observation.board is not None
    assert observation.board[1] == [4, 0, 9, 1, 0, 6, 3, 2, 5]
    assert "R2  4  .  9 |  1  .  6 |  3  2  5" in observation.messages[1].content
    assert (observation.reward, observation.done, observation.solved, observation.refused) == (0.0, False, False, None)
    assert observation.info == {"env_id": "Sudoku-v0-very-easy", "turn": 0, "reason": None}


def test_a_good_move_shows_only_what_is_new(environment: TextArenaEnvironment) -> None:
    environment.reset(seed=SEED)
    observation = play(environment, WINNING_MOVES[0], WINNING_MOVES[1])
    assert categories(observation) == [(0, "PLAYER_ACTION"), (-1, "GAME_BOARD")]
    assert observation.prompt == ""
    assert observation.board is not None
    assert observation.board[1] == [4, 7, 9, 1, 8, 6, 3, 2, 5]
    assert (observation.reward, observation.done, observation.refused) == (0.0, False, None)


def test_a_forgiven_move_names_its_reason(environment: TextArenaEnvironment) -> None:
    start = environment.reset(seed=SEED)
    observation = play(environment, WRONG_MOVE)
    assert observation.refused == (
        "Invalid move. Player 0 attempted to place 9 at (2, 2), which violates Sudoku rules."
    )
    assert observation.messages[-1].category == "GAME_ADMIN"
    assert observation.refused in observation.messages[-1].content
    assert observation.board == start.board
    assert (observation.reward, observation.done, observation.info["reason"]) == (0.0, False, None)


def test_the_losing_move_is_refused_and_pays_no_win(environment: TextArenaEnvironment) -> None:
    """P05: The second refusal in a row ends the game; the share that was filled is paid, and it is not solved."""
    environment.reset(seed=SEED)
    observation = play(environment, WINNING_MOVES[0], WRONG_MOVE, "[1 1 8]")
    assert observation.done
    assert observation.reward == pytest.approx(1 / 6)
    assert not observation.solved
    assert observation.refused == "Invalid move. Player 0 attempted to overwrite a pre-filled cell (1, 1)."
    assert observation.info["reason"] == f"Invalid Move: {observation.refused}"
    assert categories(observation) == [(0, "PLAYER_ACTION")]


def test_a_win_pays_exactly_one(environment: TextArenaEnvironment) -> None:
    environment.reset(seed=SEED)
    observation = play(environment, *WINNING_MOVES)
    assert (observation.done, observation.reward, observation.solved, observation.refused) == (True, 1.0, True, None)
    assert observation.info["turn"] == 6
    assert "Congratulations" in observation.info["reason"]


def test_no_step_before_the_first_reset(environment: TextArenaEnvironment) -> None:
    with pytest.raises(RequestError, match="call reset before step"):
        play(environment, WINNING_MOVES[0])


def test_no_step_after_the_end(environment: TextArenaEnvironment) -> None:
    environment.reset(seed=SEED)
    play(environment, *WINNING_MOVES)
    with pytest.raises(RequestError, match="The game is over: call reset"):
        play(environment, WINNING_MOVES[0])


def test_every_reset_gives_a_fresh_game(environment: TextArenaEnvironment) -> None:
    """Nothing of the last game is left, not even after a lost one of the same seed."""
    first = environment.reset(seed=SEED)
    play(environment, WINNING_MOVES[0], WRONG_MOVE, WRONG_MOVE)
    assert environment.reset(seed=SEED) == first
    assert play(environment, WRONG_MOVE).done is False


def test_without_a_seed_every_game_is_new(environment: TextArenaEnvironment) -> None:
    assert environment.reset().board != environment.reset().board


@pytest.mark.parametrize("seed", [-1, "7", 7.0, True, [7]])
def test_a_bad_seed_is_refused(environment: TextArenaEnvironment, seed: Any) -> None:
    with pytest.raises(RequestError, match="whole number from 0"):
        environment.reset(seed=seed)


def test_an_episode_id_must_be_text(environment: TextArenaEnvironment) -> None:
    with pytest.raises(RequestError, match="episode_id is 5"):
        environment.reset(episode_id=5)  # type: ignore[arg-type]


def test_an_unknown_setting_is_refused_by_name(environment: TextArenaEnvironment) -> None:
    with pytest.raises(RequestError, match="Unknown reset setting 'sed': this environment takes seed and episode_id"):
        environment.reset(sed=7)


def test_after_a_refused_reset_the_old_game_is_gone(environment: TextArenaEnvironment) -> None:
    """No step lands in a game other than the one that its caller asked for."""
    environment.reset(seed=SEED)
    with pytest.raises(RequestError):
        environment.reset(seed=-1)
    with pytest.raises(RequestError, match="call reset before step"):
        play(environment, WINNING_MOVES[0])


def test_the_state_is_plain_and_tells_no_solution(environment: TextArenaEnvironment) -> None:
    environment.reset(seed=SEED, episode_id="first")
    play(environment, *WINNING_MOVES)
    assert json.loads(environment.state.model_dump_json()) == {
        "episode_id": "first",
        "step_count": 6,
        "env_id": "Sudoku-v0-very-easy",
        "seed": SEED,
        "done": True,
        "solved": True,
    }


def test_half_a_surrogate_pair_costs_that_action_only(environment: TextArenaEnvironment) -> None:
    """W19: Text that cannot be encoded becomes text that can, and the reply can be sent."""
    environment.reset(seed=SEED)
    observation = play(environment, "bad \ud83d [2 2 7]")
    assert "bad \N{REPLACEMENT CHARACTER} [2 2 7]" in observation.messages[0].content
    assert observation.refused is None
    observation.model_dump_json().encode()


def test_a_closed_environment_plays_nothing(environment: TextArenaEnvironment) -> None:
    environment.reset(seed=SEED)
    environment.close()
    with pytest.raises(RequestError):
        play(environment, WINNING_MOVES[0])


@pytest.mark.parametrize(
    ("env_id", "move"), [("GuessTheNumber-v0", "[7]"), ("Minesweeper-v0", "[3 2]"), ("2048-v0", "[up]")]
)
def test_other_games_are_played_without_a_board(env_id: str, move: str) -> None:
    environment = TextArenaEnvironment(GameSource(env_id))
    start = environment.reset(seed=1)
    observation = play(environment, move)
    assert start.prompt
    assert start.board is observation.board is None
    assert (observation.refused, observation.done) == (None, False)
    assert observation.messages[0].content == move
    assert environment.get_metadata().name == env_id


def test_a_guessed_number_is_a_solved_game() -> None:
    environment = TextArenaEnvironment(GameSource("GuessTheNumber-v0"))
    environment.reset(seed=1)
    for guess in range(1, 11):
        observation = play(environment, f"[{guess}]")
        if observation.done:
            break
    assert (observation.solved, observation.reward) == (True, 1.0)

"""The soak's judge finds every way in which a game can come out otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak_game import CHECKS, Difference, PlayedGame, Referee, answer, check
from examples.sudoku.board import Board, random_puzzle, solve
from openenv_client.testing import Received
from schedulers import RolloutOutput, StopReason
from tests.examples.sudoku.games import wrong_move

RESET = {"seed": 1, "episode_id": "a"}
PUZZLE, SOLUTION = random_puzzle(random.Random(5), empty=6)
OBSERVATIONS, REWARDS, UNSCORED, STEPS, SERVER = CHECKS  # their names


def session(number: int, actions: list[dict[str, Any]], *, steps: int | None = None) -> list[Received]:
    requests = [Received(number, "connect", {}), Received(number, "reset", RESET)]
    return [*requests, *(Received(number, "step", action) for action in actions[:steps])]


def output(referee: Referee, **infos: Any) -> RolloutOutput:
    known = {
        "stop_reason": referee.ending,
        "step_rewards": list(referee.step_rewards),
        "rewards": dict(referee.rewards),
        "total_reward": sum(referee.step_rewards),
        "solved": referee.board.is_solved,
        "final_observation": referee.last_prompt,
        "error": None,
    }
    return RolloutOutput(response=None, messages=[dict(m) for m in referee.messages], rollout_infos={**known, **infos})


def played(answers: int | None = None, *, seed: int = 0) -> Referee:
    """A game of the soak's player, to its end or for so many answers."""
    referee = Referee(PUZZLE, "easy")
    rng = random.Random(seed)
    while referee.ending is None and len(referee.step_rewards) != answers:
        conversation = referee.messages
        if referee.step_rewards:
            conversation = [*conversation, {"role": "user", "content": referee.last_prompt}]
        referee.take(answer(conversation, rng))
    return referee


def game(referee: Referee) -> PlayedGame:
    """A scored game whose first session was lost after two steps."""
    state = {
        **RESET,
        "step_count": len(referee.actions),
        "done": referee.ending is StopReason.ENV_DONE,
        "solved": referee.board.is_solved,
    }
    forwarded = [*session(1, referee.actions, steps=2), *session(2, referee.actions), Received(2, "close", {})]
    return PlayedGame(PUZZLE, "easy", RESET, output(referee, server_state=state), forwarded)


def lost_game() -> PlayedGame:
    """A game that was lost in its fourth step."""
    referee = played(4)
    infos: dict[str, Any] = {
        "stop_reason": StopReason.ENV_LOST,
        "total_reward": None,
        "rewards": {},
        "error": "SessionLost: cut",
    }
    outcome = output(referee, step_rewards=referee.step_rewards[:3], **infos)
    return PlayedGame(PUZZLE, "easy", RESET, outcome, session(1, referee.actions))


def solved() -> Referee:
    return next(referee for referee in (played(seed=seed) for seed in range(99)) if referee.board.is_solved)


def test_a_game_as_it_must_be_passes_every_check() -> None:
    assert check(game(solved())) == [OBSERVATIONS, REWARDS, STEPS, SERVER]
    assert check(lost_game()) == [OBSERVATIONS, UNSCORED, STEPS]


def test_a_game_that_never_began_has_nothing_to_check_but_that_it_is_unscored() -> None:
    lost = lost_game()
    output = replace(lost.output, messages=[], rollout_infos={**lost.output.rollout_infos, "step_rewards": []})
    assert check(replace(lost, output=output, forwarded=[])) == [UNSCORED]


def test_games_end_in_every_way_and_players_do_everything() -> None:
    games = [played(seed=seed) for seed in range(200)]
    assert {referee.ending for referee in games} == {
        StopReason.ENV_DONE,
        StopReason.PARSE_ERROR,
        StopReason.MAX_TURNS,
    }
    assert {referee.board.is_solved for referee in games} == {True, False}
    for referee in games:
        assert sum(referee.step_rewards) == pytest.approx(sum(referee.rewards.values()))


def set_info(name: str, value: Any) -> Callable[[PlayedGame], PlayedGame]:
    def change(game: PlayedGame) -> PlayedGame:
        infos = {**game.output.rollout_infos, name: value(game.output.rollout_infos[name])}
        return replace(game, output=replace(game.output, rollout_infos=infos))

    return change


def set_messages(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[PlayedGame], PlayedGame]:
    def changed(game: PlayedGame) -> PlayedGame:
        messages = [dict(message) for message in game.output.messages]
        change(messages)
        return replace(game, output=replace(game.output, messages=messages))

    return changed


def set_forwarded(change: Callable[[list[Received]], object]) -> Callable[[PlayedGame], PlayedGame]:
    def changed(game: PlayedGame) -> PlayedGame:
        forwarded = list(game.forwarded)
        change(forwarded)
        return replace(game, forwarded=forwarded)

    return changed


def swap(items: list[Any], one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]


@pytest.mark.parametrize(
    ("change", "found_by"),
    [
        (set_messages(lambda m: swap(m, 1, 3)), OBSERVATIONS),
        (set_messages(lambda m: m[3].update(content=m[3]["content"] + " ")), OBSERVATIONS),
        (set_messages(lambda m: m[0].update(content="Play chess.")), OBSERVATIONS),
        (set_messages(lambda m: m.append({"role": "user", "content": "more"})), OBSERVATIONS),
        (set_messages(lambda m: m.append({"role": "assistant", "content": "[1 1 1]"})), OBSERVATIONS),
        (set_info("stop_reason", lambda _: StopReason.MAX_TURNS), OBSERVATIONS),
        (set_info("final_observation", lambda text: text + " "), OBSERVATIONS),
        (set_info("solved", lambda solved: not solved), OBSERVATIONS),
        (set_info("step_rewards", lambda rewards: [rewards[1], rewards[0], *rewards[2:]]), REWARDS),
        (set_info("step_rewards", lambda rewards: [*rewards[:-1], rewards[-1] + 1e-15]), REWARDS),
        (set_info("step_rewards", lambda rewards: rewards[:-1]), REWARDS),
        (set_info("rewards", lambda rewards: {**rewards, "correct_reward": 0.0}), REWARDS),
        (set_info("total_reward", lambda total: total + 1e-12), REWARDS),
        (set_forwarded(lambda f: f.insert(-1, f[-2])), STEPS),
        (set_forwarded(lambda f: f.pop(-2)), STEPS),
        (set_forwarded(lambda f: swap(f, -2, -3)), STEPS),
        (set_forwarded(lambda f: swap(f, 2, 3)), STEPS),
        (set_forwarded(lambda f: f.append(Received(3, "step", f[-2].data))), STEPS),
        (set_forwarded(lambda f: f.append(Received(3, "reset", {**RESET, "seed": 2}))), STEPS),
        (set_forwarded(lambda f: f.insert(-1, Received(2, "reset", RESET))), STEPS),
        (set_info("server_state", lambda state: {**state, "step_count": state["step_count"] + 1}), SERVER),
        (set_info("server_state", lambda state: {**state, "episode_id": "b"}), SERVER),
        (set_info("server_state", lambda state: {**state, "solved": False}), SERVER),
    ],
)
def test_whatever_is_changed_is_found(change: Callable[[PlayedGame], PlayedGame], found_by: str) -> None:
    changed = change(game(solved()))
    with pytest.raises(Difference) as caught:
        check(changed)
    assert caught.value.check == found_by


@pytest.mark.parametrize(
    ("change", "found_by"),
    [
        (set_info("total_reward", lambda _: 0.0), UNSCORED),
        (set_info("rewards", lambda _: {"correct_reward": 0.0}), UNSCORED),
        (set_info("error", lambda _: None), UNSCORED),
        (set_info("stop_reason", lambda _: StopReason.ERROR), UNSCORED),
        (set_info("step_rewards", lambda rewards: [*rewards[:-1], rewards[-1] + 1]), REWARDS),
        (set_messages(lambda m: m[3].update(content="")), OBSERVATIONS),
        (set_forwarded(lambda f: f.append(f[-1])), STEPS),
    ],
)
def test_a_lost_game_is_judged_as_far_as_it_went(change: Callable[[PlayedGame], PlayedGame], found_by: str) -> None:
    changed = change(lost_game())
    with pytest.raises(Difference) as caught:
        check(changed)
    assert caught.value.check == found_by


def test_a_game_that_was_over_may_be_lost_while_its_state_is_asked_for() -> None:
    """A last session that was opened in vain, to ask for the state, need not have got all steps."""
    right = game(solved())
    actions = [received.data for received in right.forwarded if received.session == 2 and received.kind == "step"]
    in_vain = replace(right, forwarded=[*right.forwarded, *session(3, actions, steps=1)])
    with pytest.raises(Difference):
        check(in_vain)
    del in_vain.output.rollout_infos["server_state"]
    assert check(in_vain) == [OBSERVATIONS, REWARDS, STEPS]


def test_a_board_that_nobody_can_solve_is_a_difference() -> None:
    spoiled: Board = PUZZLE.place(wrong_move(PUZZLE, SOLUTION))
    assert solve(spoiled) is None
    with pytest.raises(Difference, match="no board that can be solved"):
        answer([{"role": "user", "content": spoiled.render()}], random.Random(0))


def test_a_difference_shows_both_sides_and_the_place() -> None:
    changed = set_info("total_reward", lambda _: 7.0)(game(solved()))
    with pytest.raises(Difference) as caught:
        check(changed)
    text = str(caught.value.located("game 3"))
    assert text.startswith(f"{REWARDS}: game 3: total_reward\n7.0\ninstead of\n")

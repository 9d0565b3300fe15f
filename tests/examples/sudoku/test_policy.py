"""The shipped policy loads offline, reads every prompt, copies moves, and never met an evaluation puzzle."""

import random
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import textarena.envs.Sudoku.env as textarena_sudoku
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sudoku.board import Board, Cell, Move, parse_board, random_puzzle
from examples.sudoku.hints import DIFFICULTIES, TriedMove, build_hints
from examples.sudoku.make_policy import Turn, collate, draw_game, encode, make_tokenizer, pieces
from examples.sudoku.prompts import FORMAT_REMINDER, SYSTEM_PROMPT, refusal, render_turn

POLICY = Path(__file__).parents[3] / "examples" / "sudoku" / "policy"
HELD_OUT = range(1_000_000, 1_000_064)
LONG_GAME = 0  # a seed of ten turns with slips

Messages: TypeAlias = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(POLICY, local_files_only=True).eval()


def messages_of(game: list[Turn]) -> Messages:
    return [
        message
        for turn in game
        for message in ({"role": "user", "content": turn.prompt}, {"role": "assistant", "content": str(turn.move)})
    ]


def textarena_puzzle(seed: int) -> tuple[Board, Board]:
    """What the environment makes of a seed, and its solution; the process's random state is left as it was."""
    state = random.getstate()
    try:
        game = textarena_sudoku.SudokuEnv(clues=75)
        game.reset(num_players=1, seed=seed)
    finally:
        random.setstate(state)
    return Board.from_rows(game.game_board), Board.from_rows(game.full_grid)


def keeps_the_training_pattern(solution: Board) -> bool:
    """Whether the digits of each box row stand together in all boxes of their band, as `random_puzzle` leaves them."""
    bands = [[row[i : i + 3] for row in solution.rows[r : r + 3] for i in (0, 3, 6)] for r in (0, 3, 6)]
    return all(len({frozenset(box_row) for box_row in band}) == 3 for band in bands)


def test_the_policy_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in POLICY.iterdir()) <= 4_000_000


def test_the_shipped_tokenizer_is_the_one_that_the_script_makes(tokenizer: Any) -> None:
    made: Any = make_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<pad>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_model_and_tokenizer_agree_on_ids_and_room(tokenizer: Any, model: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("seed", range(20))
def test_prompts_and_moves_of_whole_games_survive_the_tokenizer(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    texts = [text for turn in draw_game(rng, slip=0.5) for text in (turn.prompt, str(turn.move))]
    board, _ = random_puzzle(rng, empty=30)
    texts += [render_turn(board, [], difficulty, FORMAT_REMINDER) for difficulty in DIFFICULTIES]
    texts += [refusal(board, Move(10, 0, 12)), SYSTEM_PROMPT]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_a_turn_is_short_and_a_move_is_three_tokens(tokenizer: Any) -> None:
    board, _ = random_puzzle(random.Random(0), empty=6)
    assert len(tokenizer.encode(render_turn(board))) < 150
    assert tokenizer.tokenize("[5 3 7]") == ["[5", " 3", " 7]"]
    assert all(tokenizer.tokenize(piece) == [piece] for piece in pieces())


@pytest.mark.parametrize("text", ["\uff15 \u2192 3", "\x00\r\n", "é" * 100, "<user", ""])
def test_unknown_characters_become_the_unknown_token(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) <= len(text)
    assert (tokenizer.unk_token_id in ids) == any(not " " <= letter <= "~" and letter != "\n" for letter in text)


def test_the_chat_template_drops_system_messages(tokenizer: Any) -> None:
    user = {"role": "user", "content": "R1"}
    with_system = [{"role": "system", "content": SYSTEM_PROMPT}, user]
    assert tokenizer.apply_chat_template(with_system, tokenize=False) == "<user>R1"
    assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True) == "<user>R1<assistant>"


def test_a_longer_conversation_starts_with_the_shorter_one_token_for_token(tokenizer: Any) -> None:
    def render(messages: Messages, *, ask: bool) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=ask, return_dict=False)
        return ids

    game = messages_of(draw_game(random.Random(LONG_GAME), slip=0.2))
    assert len(game) == 20
    for turn in range(2, len(game), 2):
        prompt, said = render(game[: turn - 1], ask=True), game[turn - 1]["content"]
        spoken = prompt + tokenizer.encode(said) + [tokenizer.eos_token_id]
        assert render(game[:turn], ask=False) == spoken
        assert render(game[: turn + 1], ask=True)[: len(spoken)] == spoken


def test_games_are_learned_as_the_chat_template_renders_them(tokenizer: Any) -> None:
    """Labels stand on moves and their ends; slips that are only lived with have none."""
    game = [
        turn._replace(learn=turn_number != 1)
        for turn_number, turn in enumerate(draw_game(random.Random(LONG_GAME), slip=0.2))
    ]
    ids, labels = encode(game, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages_of(game), tokenize=False)
    assert tokenizer.decode([i for i in labels if i >= 0]) == "".join(
        f"{turn.move}<end>" for turn in game if turn.learn
    )
    assert all(label in {i, -100} for i, label in zip(ids, labels, strict=True))


def test_short_games_share_a_row_of_a_batch(tokenizer: Any) -> None:
    games = [draw_game(random.Random(seed), slip=0.5) for seed in range(16)]
    batch = collate(games, tokenizer)
    rows, length = batch["input_ids"].shape
    assert batch["labels"].shape == (rows, length)
    assert rows < 16
    assert length == max(len(encode(game, tokenizer)[0]) for game in games)
    assert int((batch["labels"] == tokenizer.eos_token_id).sum()) == sum(map(len, games))


def answer(model: Any, tokenizer: Any, messages: Messages) -> str:
    """The likeliest answer."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def test_the_likeliest_answer_is_nearly_always_a_guaranteed_move(tokenizer: Any, model: Any) -> None:
    puzzles = [textarena_puzzle(seed)[0] for seed in HELD_OUT][:24]
    answers = [answer(model, tokenizer, [{"role": "user", "content": render_turn(puzzle)}]) for puzzle in puzzles]
    copied = sum(
        text in map(str, build_hints(puzzle).guaranteed) for text, puzzle in zip(answers, puzzles, strict=True)
    )
    assert copied >= 22


def test_copying_goes_on_after_a_refused_move(tokenizer: Any, model: Any) -> None:
    puzzle, _ = textarena_puzzle(HELD_OUT[0])
    guaranteed = build_hints(puzzle).guaranteed[0]
    wrong = Move(*guaranteed.cell, guaranteed.number % 9 + 1)
    messages = [
        {"role": "user", "content": render_turn(puzzle)},
        {"role": "assistant", "content": str(wrong)},
        {
            "role": "user",
            "content": render_turn(puzzle, [TriedMove(wrong, accepted=False)], "easy", refusal(puzzle, wrong)),
        },
    ]
    assert answer(model, tokenizer, messages) in map(str, build_hints(puzzle).guaranteed)


def test_every_training_puzzle_keeps_a_pattern() -> None:
    assert all(keeps_the_training_pattern(random_puzzle(random.Random(seed), empty=6)[1]) for seed in range(200))


def test_no_evaluation_puzzle_can_be_a_training_puzzle() -> None:
    """The environment's puzzles have one solution, and none of the held-out solutions keeps the training pattern."""
    for seed in HELD_OUT:
        puzzle, solution = textarena_puzzle(seed)
        assert all(puzzle.number(Cell(*cell)) in {0, solution.number(Cell(*cell))} for cell in _all_cells())
        assert not keeps_the_training_pattern(solution)


def test_the_games_that_the_policy_learns_from_hold_no_evaluation_puzzle() -> None:
    held_out = {textarena_puzzle(seed)[0] for seed in HELD_OUT}
    rng = random.Random(0)
    shown = {parse_board(turn.prompt) for _ in range(300) for turn in draw_game(rng, slip=0.3)}
    assert None not in shown
    assert held_out.isdisjoint(shown)


def _all_cells() -> list[tuple[int, int]]:
    return [(row, col) for row in range(1, 10) for col in range(1, 10)]

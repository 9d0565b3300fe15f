"""Make the embedded policy: a tiny language model that copies guaranteed Sudoku moves, but gets many digits wrong.

    python examples/sudoku/make_policy.py --output-dir examples/sudoku/policy

It is what `train_grpo.py` starts from when no other model is named: small enough to train on two CPU cores, and bad on
purpose, so that GRPO has something to improve. Three stages, since copying out of a long prompt appears late when it is
learned from the start: the hint lines of one turn, then those of whole games, then games with boards and slips.

The puzzles are drawn with `random_puzzle`, never with TextArena. Each solution is a rearrangement of one grid and keeps
a pattern of it that TextArena's grids lack, so no puzzle that the policy is evaluated on can be among them; the tests
check that for the evaluation seeds. The same seed gives the same weights on the same kind of processor and versions.
"""

from __future__ import annotations

import argparse
import random
import re
import string
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: make the checkout importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.sudoku import hints, prompts
from examples.sudoku.board import Board, Move, random_puzzle
from examples.sudoku.hints import TriedMove, build_hints

DIGITS = range(1, 10)
MOST_EMPTY = 8  # of the puzzles to learn from; very-easy Sudoku has 6
MAX_LENGTH = 8192
IGNORED = -100  # the label of what is not learned, to transformers
PAD, UNKNOWN, USER, ASSISTANT, END = "<pad>", "<unk>", "<user>", "<assistant>", "<end>"

# System messages are dropped: the policy was never taught the rules. Prefix-stable: a conversation starts, token for
# token, with any shorter one of the same messages.
CHAT_TEMPLATE = (
    "{% for message in messages if message['role'] != 'system' %}"
    "{{ '<assistant>' + message['content'] + '<end>' if message['role'] == 'assistant'"
    " else '<user>' + message['content'] }}"
    "{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}"
)


class Turn(NamedTuple):
    """What the player reads, what it answers, and whether the model learns to answer so."""

    prompt: str
    move: Move
    learn: bool = True


class Stage(NamedTuple):
    """One part of the curriculum: how to draw a game, and how long to learn from such games."""

    name: str
    draw: Callable[[random.Random], list[Turn]]
    steps: int
    batch: int
    learning_rate: float


def pieces() -> list[str]:
    """The texts that are one token each, so that a turn is short and a move is three tokens and the end."""
    lines = Board.from_rows([[0] * 9] * 9).render().splitlines()
    return [
        f"{lines[0]}\n",
        f"{lines[4]}\n",
        *(f"R{n}" for n in DIGITS),
        *(f"{bar}  {value}" for bar in ("", " |") for value in (".", *DIGITS)),
        *(f"[{n}" for n in DIGITS),
        *(f" {n}" for n in DIGITS),
        *(f" {n}]" for n in DIGITS),
        *(f" C{n}:" for n in DIGITS),
        *(f"{header}\n" for header in (hints.TRIED_HEADER, hints.GUARANTEED_HEADER, hints.OPTIONS_HEADER)),
        " accepted",
        " refused",
        *(f" refused: {reason}\n" for reason in (prompts.FILLED, prompts.WRONG, prompts.OUT_OF_RANGE)),
        f"{prompts.FORMAT_REMINDER}\n",
        "\n\n",
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the game and, letter by letter, all other printable ASCII text."""
    known = pieces()
    special = [PAD, UNKNOWN, USER, ASSISTANT, END]
    vocabulary = list(dict.fromkeys([*special, *known, "\n", *string.printable[:95]]))
    longest_first = sorted(known, key=len, reverse=True)
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(re.escape, longest_first), r"[\s\S]"])), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model of about 0.4 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def best_move(board: Board, tried: Sequence[TriedMove], rng: random.Random) -> Move:
    """The first guaranteed move; without one the first cell with few options, and one of them; else any move."""
    found = build_hints(board, tried)
    if found.guaranteed:
        return found.guaranteed[0]
    if found.options:
        option = found.options[0]
        return Move(*option.cell, rng.choice(option.numbers))
    return slipped(Move(0, 0, 0), rng, slip=1)


def slipped(move: Move, rng: random.Random, *, slip: float) -> Move:
    """The move after each of its three digits was, with probability ``slip``, replaced by a random one."""
    return Move(*(rng.choice(DIGITS) if rng.random() < slip else digit for digit in move))


def draw_turn(rng: random.Random) -> list[Turn]:
    """The hint lines of a fresh puzzle, without its board, and the best move."""
    puzzle, _ = random_puzzle(rng, empty=rng.randint(1, MOST_EMPTY))
    return [Turn(build_hints(puzzle).render(), best_move(puzzle, (), rng))]


def draw_game(rng: random.Random, *, slip: float, boards: bool = True, learn_slips: bool = True) -> list[Turn]:
    """A whole game by TextArena's rules.

    Args:
        rng: Where chance comes from.
        slip: How likely each digit of the best move is replaced by a random one. That leaves a move right with
            probability ``(1 - 8 / 9 * slip) ** 3``; the digits are independent, so this is soon learned exactly.
        boards: Show the board in every turn, not the hint lines alone.
        learn_slips: Learn wrong moves too, not only live with what they lead to.
    """
    board, solution = random_puzzle(rng, empty=rng.randint(1, MOST_EMPTY))
    limit = len(board.empty_cells) + 3
    tried: list[TriedMove] = []
    turns: list[Turn] = []
    feedback = None
    while len(turns) < limit and not board.is_solved and [attempt.accepted for attempt in tried[-2:]] != [False, False]:
        text = prompts.render_turn(board, tried, feedback=feedback) if boards else build_hints(board, tried).render()
        best = best_move(board, tried, rng)
        move = slipped(best, rng, slip=slip)
        turns.append(Turn(text, move, learn=learn_slips or move == best))
        accepted = not board.number(move.cell) and solution.number(move.cell) == move.number
        tried.append(TriedMove(move, accepted))
        feedback = None if accepted else prompts.refusal(board, move)
        board = board.place(move) if accepted else board
    return turns


def encode(game: Sequence[Turn], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """The ids of a game as the chat template renders it, and a label for each: the moves to learn and their ends."""
    ids: list[int] = []
    labels: list[int] = []
    for turn in game:
        prompt = tokenizer.encode(f"{USER}{turn.prompt}{ASSISTANT}")
        answer = tokenizer.encode(f"{turn.move}{END}")
        ids += prompt + answer
        labels += [IGNORED] * len(prompt) + (answer if turn.learn else [IGNORED] * len(answer))
    return ids, labels


def collate(games: Sequence[Sequence[Turn]], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Ids and labels of a batch, each of shape ``(rows, length of the longest game)``.

    Short games share a row. What stood before in the row is like an older turn: to be ignored. The padding stands at
    the end, where causal attention never looks, so no mask is needed.
    """
    encoded = [encode(game, tokenizer) for game in games]
    length = max(len(ids) for ids, _ in encoded)
    rows: list[tuple[list[int], list[int]]] = []
    for ids, labels in encoded:
        if not rows or len(rows[-1][0]) + len(ids) > length:
            rows.append(([], []))
        rows[-1][0].extend(ids)
        rows[-1][1].extend(labels)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    return {
        "input_ids": torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows]),
    }


def learn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage, rng: random.Random) -> None:
    """Train the model on one stage, with a progress bar that shows the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=stage.learning_rate, total_steps=stage.steps, pct_start=0.15
    )
    model.train()
    with tqdm(range(stage.steps), desc=stage.name, unit="step") as bar:
        for _ in bar:
            batch = collate([stage.draw(rng) for _ in range(stage.batch)], tokenizer)
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}")


def copied(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> float:
    """The share of the answers' tokens that are the likeliest ones, in fresh games without slips."""
    batch = collate([draw_game(rng, slip=0.0) for _ in range(32)], tokenizer)
    labels = batch["labels"][:, 1:]
    with torch.inference_mode():
        likeliest = model.eval()(batch["input_ids"], use_cache=False).logits[:, :-1].argmax(-1)
    return float((likeliest == labels)[labels != IGNORED].float().mean())


def main() -> None:
    """Read the command line, train through the stages, save."""
    parser = argparse.ArgumentParser(
        description="Make the embedded Sudoku policy from scratch (four minutes on one core)."
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path(__file__).parent / "policy", help="default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of puzzles, moves and first weights (default: %(default)s)"
    )
    parser.add_argument(
        "--slip", type=float, default=0.2, help="chance that a digit of a move is a random one (default: %(default)s)"
    )
    options = parser.parse_args()
    if not 0 <= options.slip <= 1:
        parser.error(f"--slip must lie in 0..1, not {options.slip}")

    torch.set_num_threads(1)  # sums in the same order everywhere, or a seed would not give the same weights
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)

    hint_game = partial(draw_game, slip=0.1, boards=False, learn_slips=False)
    imperfect_game = partial(draw_game, slip=options.slip)
    stages = [
        Stage("hint lines", draw_turn, steps=80, batch=64, learning_rate=3e-3),
        Stage("games of hint lines", hint_game, steps=120, batch=32, learning_rate=2e-3),
        Stage("imperfect games", imperfect_game, steps=120, batch=16, learning_rate=1.5e-3),
    ]
    for stage in stages:
        learn(model, tokenizer, stage, rng)
    print(f"likeliest tokens that are right, in perfect games: {copied(model, tokenizer, rng):.1%}")
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()

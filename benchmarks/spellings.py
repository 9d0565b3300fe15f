"""Small policies that say moves in many spellings: tokens that the tokenizer itself would not choose for that text."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from typing import Any

import tokenizers
import torch
import transformers

from examples.sudoku.board import Move, random_puzzle
from examples.sudoku.prompts import SYSTEM_PROMPT, render_turn

__all__ = ["TEMPLATE", "boards", "make_policy", "make_tokenizer", "moves", "teach"]

PAD, END = "<pad>", "<end>"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CUT = 0.2  # how likely an answer is cut between two letters before it is tokenised


def moves(rng: random.Random, count: int) -> list[str]:
    """Any moves, such as ``[5 3 7]``."""
    return [str(Move(*(rng.randint(1, 9) for _ in range(3)))) for _ in range(count)]


def boards(rng: random.Random, count: int) -> list[str]:
    """What a player reads in a turn."""
    return [render_turn(random_puzzle(rng, empty=4)[0]) for _ in range(count)]


def make_tokenizer(texts: Sequence[str]) -> Any:
    """A BPE tokenizer whose merges cross the blanks of a move, so that ``[5 3 7]`` becomes a single token.

    Args:
        texts: What it is to know; of others it knows the letters, if they are ASCII.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")  # no cut at blanks
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, END, "<system>", "<user>", "<assistant>"],
        initial_alphabet=list(string.printable),
        show_progress=False,
    )
    backend.train_from_iterator([*texts, SYSTEM_PROMPT], trainer)
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def teach(tokenizer: Any, prompts: Sequence[str], answers: Sequence[str], *, steps: int = 160, seed: int = 0) -> Any:
    """Train a tiny model, for some seconds, on answers in random spellings behind ends of prompts.

    Args:
        tokenizer: Of the BPE kind.
        prompts: What users say.
        answers: What assistants say.
        steps: Of the optimizer, 16 answers each.
        seed: Of weights and spellings.

    Returns:
        A model of two layers of width 64, whose output layer is its embedding.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    contexts = [_prompt(tokenizer, text) for text in prompts]
    spelled = _spell(tokenizer, answers, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        known = round(256 ** rng.random())  # tokens of the prompts: mostly few, for speed
        rows = [(rng.choice(contexts)[-known:], rng.choice(spelled)) for _ in range(16)]
        width = max(len(context) + len(answer) for context, answer in rows)
        ids = torch.full((16, width), tokenizer.pad_token_id)
        labels = torch.full((16, width), -100)
        for row, (context, answer) in enumerate(rows):
            end = len(context) + len(answer)
            ids[row, :end] = torch.tensor(context + answer)
            labels[row, len(context) : end] = torch.tensor(answer)
        hidden = model.model(ids).last_hidden_state[:, :-1]
        learned = labels[:, 1:] != -100  # a large vocabulary would make the logits of all others expensive
        torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), labels[:, 1:][learned]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def make_policy(seed: int = 0) -> tuple[Any, Any]:
    """A model that says moves in many spellings, and its tokenizer, which has ``[5 3 7]`` as a single token."""
    rng = random.Random(seed)
    answers, prompts = moves(rng, 2000), boards(rng, 8)
    tokenizer = make_tokenizer(answers + prompts)
    return teach(tokenizer, prompts, answers, seed=seed), tokenizer


def _prompt(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def _spell(tokenizer: Any, answers: Sequence[str], rng: random.Random) -> list[list[int]]:
    """Each answer in a random spelling, cut anywhere and its pieces tokenised one by one, with the end behind it."""
    rows = []
    for answer in answers:
        cuts = [0, *(place for place in range(1, len(answer)) if rng.random() < _CUT), len(answer)]
        pieces = [answer[start:end] for start, end in itertools.pairwise(cuts)]
        ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        rows.append([*ids, tokenizer.eos_token_id])
    return rows

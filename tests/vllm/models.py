"""Small models for vLLM, and what a plain forward pass of transformers says of their tokens."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from examples.sudoku.board import Move, random_puzzle
from examples.sudoku.prompts import SYSTEM_PROMPT, render_turn
from schedulers.engines.vllm import VLLMEngine

POLICY = Path(__file__).parents[2] / "examples" / "sudoku" / "policy"
PAD, END = "<pad>", "<end>"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28, "max_num_seqs": 64}


def start(folder: Path, *, asynchronous: bool = False, **arguments: Any) -> VLLMEngine:
    """Start vLLM on the CPU with what a test needs."""
    options = OPTIONS if asynchronous else {**OPTIONS, "distributed_executor_backend": "uni"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports when it starts
        return VLLMEngine.from_pretrained(
            folder, dtype="float32", asynchronous=asynchronous, options=options, **arguments
        )


def make_bpe_policy() -> tuple[Any, Any]:
    """A model that says moves, with an output layer that is its embedding, and a tokenizer with merges across them.

    Its tokenizer was trained on moves as whole words, so ``[5 3 7]`` has one spelling that the tokenizer would choose
    and several more, and the model has learned to use them all.
    """
    rng = random.Random(0)
    moves = [str(Move(*(rng.randint(1, 9) for _ in range(3)))) for _ in range(2000)]
    texts = [SYSTEM_PROMPT, *(render_turn(random_puzzle(rng, empty=4)[0]) for _ in range(8))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")  # no cut at spaces: merges cross them
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=[PAD, END, "<system>", "<user>", "<assistant>"], show_progress=False
    )
    backend.train_from_iterator(moves + texts, trainer)
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return _taught(backend, texts, moves), tokenizer


def _taught(backend: Any, texts: Sequence[str], moves: Sequence[str]) -> Any:
    """Train for some seconds on moves behind the ends of prompts, in random spellings."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=backend.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
            bos_token_id=None, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    contexts = [backend.encode(f"{text}{END}<assistant>").ids[-24:] for text in texts]
    backend.model.dropout = 0.3
    spelled = [backend.encode(f"{move}{END}").ids for move in moves]
    backend.model.dropout = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    for _ in range(120):
        rows = [(rng.choice(contexts), rng.choice(spelled)) for _ in range(16)]
        width = max(len(context) + len(move) for context, move in rows)
        padding = [[0] * (width - len(context) - len(move)) for context, move in rows]
        ids = torch.tensor([c + m + p for (c, m), p in zip(rows, padding, strict=True)])
        labels = torch.tensor([[-100] * len(c) + m + [-100] * len(p) for (c, m), p in zip(rows, padding, strict=True)])
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def forward(model: Any, ids: Sequence[int]) -> Any:
    """The log-probabilities of every token that could follow, shape ``(length, vocabulary)``; no cache, no batch."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


def forward_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Those of ``ids`` behind ``prompt``."""
    logprobs = forward(model, [*prompt, *ids])[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logprobs, ids, strict=True)]


def changed(model: Any, seed: int) -> Any:
    """A copy of the model after what might have been an optimizer's step."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return other.eval()

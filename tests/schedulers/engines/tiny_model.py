"""A tiny random model and a tokenizer of single characters, made on the spot."""

from __future__ import annotations

from typing import Any

import tokenizers
import torch
import transformers

ROLES = ["<system>", "<user>", "<assistant>"]
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
SPECIAL = [PAD, END, *ROLES, UNKNOWN]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .[]"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Any:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=ROLES,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(*, seed: int = 0, max_position_embeddings: int = 256, **config: Any) -> Any:
    """Two layers of width 16 with weights large enough for tokens to differ clearly in probability."""
    rng = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(SPECIAL) + len(CHARACTERS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.3,
            max_position_embeddings=max_position_embeddings,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            **config,
        )
    )
    torch.random.set_rng_state(rng)
    return model

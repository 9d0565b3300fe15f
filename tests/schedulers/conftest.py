"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from tests.schedulers.chat_tokenizer import ChatTokenizer


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()

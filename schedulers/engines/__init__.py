"""Inference engines behind one small Protocol.

Engines that need more than the base installation are imported by their full names, such as
``from schedulers.engines.transformers import TransformersEngine``.
"""

from schedulers.engines.base import ContextOverflowError, InferEngine, Tokenizer
from schedulers.engines.scripted import ScriptedCall, ScriptedEngine

__all__ = ["ContextOverflowError", "InferEngine", "ScriptedCall", "ScriptedEngine", "Tokenizer"]

"""Inference engines behind one small Protocol.

Engines that need more than the base installation are imported by their full names, such as
``from schedulers.engines.transformers import TransformersEngine``.
"""

from schedulers.engines.base import InferEngine, Tokenizer
from schedulers.engines.scripted import ScriptedCall, ScriptedEngine

__all__ = ["InferEngine", "ScriptedCall", "ScriptedEngine", "Tokenizer"]

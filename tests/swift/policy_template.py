"""The embedded policy's chat template in ms-swift's terms: a jinja template takes no answers that are token ids."""

from __future__ import annotations

from swift.template import TemplateMeta, register_template

register_template(
    TemplateMeta(
        "sudoku_policy",
        prefix=[],
        prompt=["<user>{{QUERY}}<assistant>"],
        chat_sep=["<end>"],
        suffix=["<end>"],
        system_prefix=[],
    ),
    exist_ok=True,
)

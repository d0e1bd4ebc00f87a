"""Draft models by name: errors."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import AssistantError, OptionError, TreeConfig
from tests.tiny_models import build, repetitive_prompt

PROMPT = repetitive_prompt()


class TestRefusals:
    @pytest.mark.parametrize("strategy", ["draft", "tree"])
    def test_no_assistant(self, strategy: str) -> None:
        with pytest.raises(AssistantError, match="truncated_draft"):
            build("llama").generate(PROMPT, max_new_tokens=4, spec_strategy=strategy)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_draft_tokens": 0},
            {"length_policy": "often"},
            {"confidence_threshold": 2},
            {"sample_drafts": 1},
            {"children": 0},
            {"expanded_per_level": 1.5},
            {"max_nodes": 0},
            {"min_probability": -0.1},
            {"min_sibling_ratio": 1.1},
        ],
    )
    def test_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(options))):
            TreeConfig(**options)

"""Calls of the tiny Llama with strategies whose draft length is set by the cost model."""

from __future__ import annotations

from typing import Any

from tests.falcon_reference import random_head
from tests.tiny_models import build, disco_adapter, draft_model, prompts

NAMES = ("lookup", "draft", "tree", "gsd", "disco", "falcon")
NEW_TOKENS = 24


def assistant(name: str) -> Any:
    """Return the assistant of the strategy."""
    if name == "lookup":
        return None
    if name == "falcon":
        return random_head("llama")
    return disco_adapter("llama") if name == "disco" else draft_model("llama")


def generate(strategy: Any, given: Any, kind: str = "one", **settings: Any) -> Any:
    """Return the greedy output for the prompts `kind` with the assistant `given`."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings}
    return build("llama").generate(
        **prompts("llama", kind),
        **settings,
        spec_strategy=strategy,
        assistant=given,
        return_dict_in_generate=True,
    )

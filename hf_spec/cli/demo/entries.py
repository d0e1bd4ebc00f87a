"""Prompts and strategies of the demo: by default all without training, and the shipped head.

The prompts were selected because SmolLM2-135M-Instruct answers them well and ends its answers. They
differ in how much text can be copied: most of the summary, nothing of the fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from hf_spec.adapters.folder import CONFIG_NAME, load_adapter
from hf_spec.common.errors import AssistantError
from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench.summary import IDLE
from hf_spec.methods.entries import Entry, parse_entries

# Part of the repository (13 MB), not of the installed package.
HEAD = Path("examples/adapters/smollm2-135m-falcon")
CHECKOUT = Path(__file__).parents[3]

TEXTS = {
    "summary": (
        "Summarize: The first bicycle with pedals was built in France in the 1860s. It had a "
        "wooden frame and iron wheels, and people called it the boneshaker because riding it was "
        "so rough. In 1888 John Dunlop made the first rubber tyre filled with air. After that, "
        "bicycles became comfortable and millions were sold."
    ),
    "translation": (
        "Translate this Python function to JavaScript:\n\n"
        "```python\ndef add(a, b):\n    return a + b\n```"
    ),
    "code": (
        "Write a Python function `is_palindrome(text)` that returns True if the text reads the "
        "same backwards."
    ),
    "fact": "Explain photosynthesis in simple words.",
}
PROMPTS = tuple(Prompt(name, name, (text,)) for name, text in TEXTS.items())


def find_head(roots: Sequence[Path] | None = None) -> Path | None:
    """Return the shipped Falcon head in one of `roots` (default: current folder, checkout)."""
    for root in (Path.cwd(), CHECKOUT) if roots is None else roots:
        if (root / HEAD / CONFIG_NAME).is_file():
            return root / HEAD
    return None


def default_entries(model: PreTrainedModel, head: Path | None) -> tuple[list[Entry], str]:
    """Return the default entries, and a message about a missing head or ""."""
    missing = (
        f"its head, {HEAD}, is in the repository but not in the installed package; run the demo in "
        "a checkout, or add --strategy falcon@FOLDER"
    )
    if head is not None:
        try:
            load_adapter(head, "falcon").base.check(model)
            return parse_entries([IDLE, "lookup", "falcon", "auto"], [str(head)]), ""
        except AssistantError as error:
            missing = str(error)
    return parse_entries([IDLE, "lookup", "auto"]), f"falcon is left out: {missing}"

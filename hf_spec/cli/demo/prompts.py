"""The prompts of the demo.

Chosen among a hundred because SmolLM2-135M-Instruct answers them well and ends by itself. They are
meant to differ in what drafts can bring: the summary copies most of its text, the fact nothing.
"""

from __future__ import annotations

from hf_spec.data.prompts import Prompt

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

"""The prompts of the demo, and how much of an answer was copied from its prompt.

Chosen among a hundred because SmolLM2-135M-Instruct answers them well and ends by itself. They are
meant to differ in what drafts can bring: the summary copies most of its text, the fact nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_spec.data.prompts import Prompt

# Shorter runs of tokens are shared by any two texts on the same subject.
COPIED_NGRAM_LEN = 3

SUMMARY = """\
Summarize: The first bicycle with pedals was built in France in the 1860s. It had a wooden frame \
and iron wheels, and people called it the boneshaker because riding it was so rough. In 1888 John \
Dunlop made the first rubber tyre filled with air. After that, bicycles became comfortable and \
millions were sold."""

TRANSLATION = """\
Translate this Python function to JavaScript:

```python
def add(a, b):
    return a + b
```"""

CODE = (
    "Write a Python function `is_palindrome(text)` that returns True if the text reads the same "
    "backwards."
)

FACT = "Explain photosynthesis in simple words."

PROMPTS = tuple(
    Prompt(name, name, (text,))
    for name, text in (
        ("summary", SUMMARY),
        ("translation", TRANSLATION),
        ("code", CODE),
        ("fact", FACT),
    )
)


def copied_share(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """Return the share of output tokens that stand in a run of tokens which the prompt has too.

    Args:
        prompt_ids: Tokens of the prompt.
        output_ids: Tokens of the answer.

    Returns:
        From 0 to 1; a run has at least `COPIED_NGRAM_LEN` tokens.
    """
    length = COPIED_NGRAM_LEN
    in_prompt = set(zip(*(prompt_ids[start:] for start in range(length)), strict=False))
    copied: set[int] = set()
    for start in range(len(output_ids) - length + 1):
        if tuple(output_ids[start : start + length]) in in_prompt:
            copied.update(range(start, start + length))
    return len(copied) / max(len(output_ids), 1)

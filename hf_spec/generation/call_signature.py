"""Signatures and docstrings of the wrapped methods: those of transformers plus our arguments."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from inspect import Parameter
from typing import Any

# Keyword arguments that wrappers add: annotation and description.
ADDITIONS = {
    "spec_strategy": (
        "str | StrategyConfig | dict[str, Any] | None",
        "Speculative decoding with hf_spec: the name of a strategy such as 'lookup', 'draft', "
        "'tree', 'falcon' or 'auto' (`hf_spec.known_strategies()` lists them), or a config such as "
        "`hf_spec.LookupConfig(copy_length=10)`. Default: `generation_config.spec_strategy`; "
        "without one, transformers decodes as usual. Greedy output stays identical token for "
        "token, and sampling keeps its distribution.",
    ),
    "assistant": (
        "PreTrainedModel | SpecAdapter | LookupStore | str | os.PathLike[str] | Sequence[Any] | "
        "None",
        "What the strategy drafts with: a draft model, an adapter, or the folder or Hub id of "
        "either; for 'auto' also a list of them; for 'lookup' and 'auto' a `hf_spec.LookupStore`. "
        "A draft model with another vocabulary also needs `tokenizer` and `assistant_tokenizer`.",
    ),
    "max_batch": (
        "int | None",
        "With a strategy, maximum number of sequences at a time. Default: 8.",
    ),
}


def describe(wrapper: Callable[..., Any], original: Callable[..., Any], *names: str) -> None:
    """Copy the original's signature and docstring to a wrapper, with `ADDITIONS` inserted."""
    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    rest = [p for p in parameters if p.kind is Parameter.VAR_KEYWORD]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=ADDITIONS[name][0])
        for name in names
    ]
    fixed = [p for p in parameters if p not in rest]
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*fixed, *added, *rest]
    )
    wrapper.__doc__ = _with_additions(original.__doc__ or "", names)


def _with_additions(text: str, names: tuple[str, ...]) -> str:
    """Return the docstring with entries before that of `kwargs`, else before the returns."""
    kwargs = re.search(r"^([ ]*)kwargs \(", text, re.MULTILINE)
    returns = re.search(r"^[ ]*Returns?:", text, re.MULTILINE)
    match = kwargs or returns
    if match is None:
        text += "\n"
    start = match.start() if match else len(text)
    # Entries are indented one step deeper than the headings.
    margin = kwargs[1] if kwargs else " " * 12
    entries = "".join(_entry(name, margin) for name in names)
    return text[:start] + entries + text[start:]


def _entry(name: str, margin: str) -> str:
    annotation, text = ADDITIONS[name]
    lines = textwrap.fill(text, 116 - len(margin), break_long_words=False)
    head = f"{name} (`{annotation}`, *optional*):"
    return f"{margin}{head}\n{textwrap.indent(lines, margin + '    ')}\n"

"""What `help()`, editors and `inspect.signature` say of the wrapped methods.

The parameters and the text are those of transformers, with ours before `**kwargs`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from inspect import Parameter
from typing import Any

# Keyword arguments that wrappers add: type, as `inspect.signature` shows it, and meaning.
ADDITIONS = {
    "spec_strategy": (
        "str | StrategyConfig | dict[str, Any] | None",
        "Speculative decoding with hf_spec: the name of a strategy such as 'lookup', 'draft', "
        "'tree', 'falcon' or 'auto' (`hf_spec.known_strategies()` lists them), or a config such as "
        "`hf_spec.LookupConfig(copy_length=10)`. By default what is stored as "
        "`generation_config.spec_strategy`; without one, transformers decodes as ever. Greedy "
        "output stays the same token for token, sampling keeps its distribution.",
    ),
    "assistant": (
        "PreTrainedModel | SpecAdapter | LookupStore | str | os.PathLike[str] | Sequence[Any] | "
        "None",
        "What the strategy drafts with: a draft model, an adapter, or the folder or Hub id of "
        "either; for 'auto' also a list of them; for 'lookup' and 'auto' a `hf_spec.LookupStore`. "
        "With a draft model of another vocabulary `tokenizer` and `assistant_tokenizer` are given.",
    ),
    "max_batch": ("int | None", "With a strategy, most sequences at a time, 8 by default."),
}


def describe(wrapper: Callable[..., Any], original: Callable[..., Any], *names: str) -> None:
    """Give a wrapper the original's signature and text, with `ADDITIONS` before `**kwargs`."""
    known = inspect.signature(original)
    parameters = list(known.parameters.values())
    rest = [p for p in parameters if p.kind is Parameter.VAR_KEYWORD]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=ADDITIONS[name][0])
        for name in names
    ]
    fixed = [p for p in parameters if p not in rest]
    wrapper.__signature__ = known.replace(  # type: ignore[attr-defined]
        parameters=[*fixed, *added, *rest]
    )
    wrapper.__doc__ = _with_additions(original.__doc__ or "", names)


def _with_additions(text: str, names: tuple[str, ...]) -> str:
    """The docstring with entries before that of `kwargs`, else before what is returned."""
    place = re.search(r"^([ ]*)kwargs \(", text, re.MULTILINE)
    end = re.search(r"^[ ]*Returns?:", text, re.MULTILINE)
    at = place or end
    if at is None:
        text += "\n"
    start = at.start() if at else len(text)
    # Entries stand one step deeper than the headings.
    margin = place[1] if place else " " * 12
    entries = "".join(_entry(name, margin) for name in names)
    return text[:start] + entries + text[start:]


def _entry(name: str, margin: str) -> str:
    annotation, text = ADDITIONS[name]
    lines = textwrap.fill(text, 116 - len(margin), break_long_words=False)
    head = f"{name} (`{annotation}`, *optional*):"
    return f"{margin}{head}\n{textwrap.indent(lines, margin + '    ')}\n"

"""Strategies as a command line names them: NAME[:OPTION=JSON,...][@ASSISTANT]."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.methods.loading import find_assistant
from hf_spec.methods.registry import make_drafter, parse_strategy


class Entry(NamedTuple):
    """A strategy that is measured or verified, with the name that tables and reports give it."""

    name: str
    config: StrategyConfig
    assistant: Any = None

    @property
    def method(self) -> dict[str, Any]:
        """The arguments of `generate()` that make it speculate."""
        return {"spec_strategy": self.config, "assistant": self.assistant}

    @property
    def short_name(self) -> str:
        """The name, of a folder the last part alone."""
        head, at, assistant = self.name.partition("@")
        return f"{head}{at}{PurePath(assistant).name}"


def parse_entry(text: str, *, compile_layers: bool | None = True) -> Entry:
    """Read NAME[:OPTION=JSON,...][@ASSISTANT]; errors are those of `parse_strategy`.

    `compile_layers` is the default of the option `compile`: a command owns the model that it loads.
    """
    head, _, assistant = text.partition("@")
    name, _, given = head.partition(":")
    options: dict[str, Any] = {"strategy": name, "compile": compile_layers}
    for pair in filter(None, _split(given)):
        key, _, value = pair.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return Entry(text, parse_strategy(options), assistant or None)


def parse_entries(
    texts: Iterable[str],
    assistants: Sequence[str] = (),
    *,
    others_follow: bool = False,
    compile_layers: bool | None = True,
) -> list[Entry]:
    """Entries with `assistants` for those that name none and take some.

    One serves every strategy; several, as a list, "auto" alone. Where others follow, they may be
    for those.

    Raises:
        OptionError: for an unknown strategy or option, and assistants that none takes.
        AssistantError: if a strategy lacks its assistant.
    """
    given: Any = assistants[0] if len(assistants) == 1 else list(assistants) or None
    found, is_used = list[Entry](), others_follow
    for entry in (parse_entry(text, compile_layers=compile_layers) for text in texts):
        takes = entry.config.needs_assistant or entry.config.strategy == "auto"
        own = entry.assistant or (given if takes else None)
        is_used |= own is given
        if entry.config.needs_assistant and own is None:
            raise AssistantError(f"--strategy {entry.name} needs --assistant, a folder or a Hub id")
        found.append(entry._replace(assistant=own))
    if assistants and not is_used:
        raise OptionError(
            f"--assistant {assistants[0]}: no strategy that was named asks for it; write it after "
            f"one that takes it, NAME@{assistants[0]}, or leave it out"
        )
    return found


def found_entry(entry: Entry, model: PreTrainedModel) -> Entry:
    """An entry by its short name, with what its assistant is to `model`.

    Raises:
        SpecError: if that does not fit.
    """
    assistant = find_assistant(entry.assistant, model, entry.config.adapter_methods)
    make_drafter(entry.config, model, assistant)
    return Entry(entry.short_name, entry.config, assistant)


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts

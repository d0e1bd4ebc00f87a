"""Strategies of a command line: NAME[:OPTION=JSON,...][@ASSISTANT]."""

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
    """Strategy to measure or verify, with its name in tables and reports."""

    name: str
    config: StrategyConfig
    assistant: Any = None

    @property
    def method(self) -> dict[str, Any]:
        """Arguments of `generate()` that select the strategy."""
        return {"spec_strategy": self.config, "assistant": self.assistant}

    @property
    def for_short_texts(self) -> Entry:
        """The entry for texts of a few tokens, see `StrategyConfig.for_short_texts`."""
        return self._replace(config=self.config.for_short_texts())

    @property
    def short_name(self) -> str:
        """Name with only the last part of an assistant's path."""
        head, at, assistant = self.name.partition("@")
        return f"{head}{at}{PurePath(assistant).name}"


def parse_entry(text: str, *, compile_layers: bool | None = True) -> Entry:
    """Parse NAME[:OPTION=JSON,...][@ASSISTANT]; raises the errors of `parse_strategy`.

    `compile_layers` is the default of the option `compile`: a command owns the model that it loads.
    """
    head, _, assistant = text.partition("@")
    name, _, pairs = head.partition(":")
    options: dict[str, Any] = {"strategy": name, "compile": compile_layers}
    for pair in filter(None, _split_outside_brackets(pairs)):
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
    """Parse entries; those that name no assistant but use one get `assistants`.

    One assistant goes to every such strategy; several go as a list, which only "auto" supports.
    Unknown strategies or options raise `OptionError`, as do assistants that no strategy uses,
    unless `others_follow`. A strategy without its assistant raises `AssistantError`.
    """
    shared: Any = assistants[0] if len(assistants) == 1 else list(assistants) or None
    entries, is_used = list[Entry](), others_follow
    for entry in (parse_entry(text, compile_layers=compile_layers) for text in texts):
        supports = entry.config.needs_assistant or entry.config.strategy == "auto"
        assistant = entry.assistant or (shared if supports else None)
        is_used |= assistant is shared
        if entry.config.needs_assistant and assistant is None:
            raise AssistantError(f"--strategy {entry.name} needs --assistant, a folder or a Hub id")
        entries.append(entry._replace(assistant=assistant))
    if assistants and not is_used:
        raise OptionError(
            f"--assistant {assistants[0]}: none of the named strategies uses an assistant; write "
            f"it after a strategy that does, NAME@{assistants[0]}, or leave it out"
        )
    return entries


def with_baseline(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries, after "none" (the engine without drafting) if it is not among them."""
    has_baseline = any(entry.config.strategy == "none" for entry in entries)
    return [*([] if has_baseline else [parse_entry("none")]), *entries]


def resolve_entry(entry: Entry, model: PreTrainedModel) -> Entry:
    """Return the entry under its short name, with its assistant loaded for `model`.

    Raises `SpecError` if the assistant or the options do not fit.
    """
    assistant = find_assistant(entry.assistant, model, entry.config.adapter_methods)
    make_drafter(entry.config, model, assistant)
    return Entry(entry.short_name, entry.config, assistant)


def _split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are not inside [] or {}."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts

"""What the demo compares: by default everything that needs no training, and the shipped head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

import hf_spec
from hf_spec.adapters.folder import CONFIG_NAME, load_adapter
from hf_spec.bench.contenders import parse_entry, with_assistants
from hf_spec.bench.lineup import Entry
from hf_spec.errors import AssistantError

# Thirteen megabytes, which only the repository has; the installed package does not.
HEAD = Path("examples/adapters/smollm2-135m-falcon")
ENGINE_ALONE = "none"


def find_head(roots: Sequence[Path] | None = None) -> Path | None:
    """Return the folder of the shipped Falcon head, or None outside a checkout.

    Args:
        roots: Where it is looked for; this folder and that of the package by default.
    """
    package = Path(hf_spec.__file__).parents[1]
    for root in (Path.cwd(), package) if roots is None else roots:
        if (root / HEAD / CONFIG_NAME).is_file():
            return root / HEAD
    return None


def default_entries(model: PreTrainedModel, head: Path | None) -> tuple[list[Entry], str]:
    """Return what is compared if nothing is named.

    Args:
        model: The target.
        head: Folder of the shipped Falcon head, if there is one.

    Returns:
        Entries, and what is to be said about those that are missing; empty if none is.
    """
    missing = ""
    if head is None:
        missing = (
            f"falcon is left out: its head, {HEAD}, is in the repository and not in the installed "
            "package; start the demo in a checkout, or add --strategy falcon@FOLDER"
        )
    else:
        try:
            load_adapter(head, "falcon").base.check(model)
        except AssistantError as error:
            head, missing = None, f"falcon is left out: {error}"
    entries = [_entry(ENGINE_ALONE), _entry("lookup")]
    if head is not None:
        entries.append(_entry("falcon", head))
    return [*entries, _entry("auto", head)], missing


def chosen_entries(strategies: Sequence[str], assistants: Sequence[str]) -> list[Entry]:
    """Return the engine alone, as a baseline, and the named strategies.

    Args:
        strategies: NAME[:OPTION=JSON,...][@ASSISTANT] each.
        assistants: For strategies that name none.

    Raises:
        SpecError: If a strategy, an option or an assistant is unknown or missing.
    """
    named = list(with_assistants([parse_entry(text) for text in strategies], assistants))
    has_baseline = any(config.strategy == ENGINE_ALONE for _, config, _ in named)
    return named if has_baseline else [_entry(ENGINE_ALONE), *named]


def _entry(name: str, assistant: Path | None = None) -> Entry:
    _, config, _ = parse_entry(name)
    return name, config, None if assistant is None else str(assistant)

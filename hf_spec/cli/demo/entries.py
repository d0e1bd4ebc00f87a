"""What the demo compares: by default everything that needs no training, and the shipped head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from hf_spec.adapters.folder import CONFIG_NAME, load_adapter
from hf_spec.bench.entries import Entry, parse_entries, parse_entry
from hf_spec.bench.summary import IDLE
from hf_spec.errors import AssistantError

# Thirteen megabytes, which only the repository has; the installed package does not.
HEAD = Path("examples/adapters/smollm2-135m-falcon")
CHECKOUT = Path(__file__).parents[3]


def find_head(roots: Sequence[Path] | None = None) -> Path | None:
    """The folder of the shipped Falcon head, or None outside a checkout.

    Args:
        roots: where it is looked for; this folder and that of the package by default.
    """
    for root in (Path.cwd(), CHECKOUT) if roots is None else roots:
        if (root / HEAD / CONFIG_NAME).is_file():
            return root / HEAD
    return None


def default_entries(model: PreTrainedModel, head: Path | None) -> tuple[list[Entry], str]:
    """What is compared if nothing is named, and a sentence about what is missing, or "".

    Args:
        model: the target.
        head: folder of the shipped Falcon head, if there is one.
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
    if head is None:
        return parse_entries([IDLE, "lookup", "auto"]), missing
    return parse_entries([IDLE, "lookup", "falcon", "auto"], [str(head)]), missing


def chosen_entries(strategies: Sequence[str], assistants: Sequence[str]) -> list[Entry]:
    """The engine alone, as a baseline, and the named strategies.

    Args:
        strategies: NAME[:OPTION=JSON,...][@ASSISTANT] each.
        assistants: for strategies that name none.

    Raises:
        SpecError: if a strategy, an option or an assistant is unknown or missing.
    """
    named = parse_entries(strategies, assistants)
    if any(entry.config.strategy == IDLE for entry in named):
        return named
    return [parse_entry(IDLE), *named]

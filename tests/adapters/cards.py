"""Model cards as the Hub reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard


def card_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics that the Hub shows for the card in `folder`, by name."""
    found = ModelCard.load(folder / "README.md").data.eval_results or []
    return {one.metric_name: one.metric_value for one in found}


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures rounded as in a card."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}

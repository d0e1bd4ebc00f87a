"""Reading model cards as the Hub does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard


def card_metrics(folder: Path) -> dict[str, float]:
    """What the Hub shows beside the card in `folder`, by name."""
    found = ModelCard.load(folder / "README.md").data.eval_results or []
    return {one.metric_name: one.metric_value for one in found}


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures as cards state them."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}

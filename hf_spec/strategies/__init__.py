"""The strategies that `spec_strategy=` can name, one file each."""

from hf_spec.strategies.base import (
    StrategyConfig,
    known_strategies,
    make_drafter,
    parse_strategy,
    register,
)
from hf_spec.strategies.draft_model import DraftConfig, TreeConfig
from hf_spec.strategies.gsd import GsdConfig
from hf_spec.strategies.lookup import LookupConfig

__all__ = [
    "DraftConfig",
    "GsdConfig",
    "LookupConfig",
    "StrategyConfig",
    "TreeConfig",
    "known_strategies",
    "make_drafter",
    "parse_strategy",
    "register",
]

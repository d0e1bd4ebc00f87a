"""Lossless speculative decoding for Hugging Face models.

Importing this package lets `model.generate()` understand `spec_strategy=` and `assistant=`.
"""

from hf_spec.errors import AssistantError, OptionError, SpecError, UnsupportedError
from hf_spec.hook import disable, enable
from hf_spec.models.truncated import truncated_draft
from hf_spec.outputs import SpecGenerateOutput, SpecStats
from hf_spec.strategies import (
    DraftConfig,
    GsdConfig,
    LookupConfig,
    StrategyConfig,
    TreeConfig,
    known_strategies,
)

__version__ = "0.1.0"

__all__ = [
    "AssistantError",
    "DraftConfig",
    "GsdConfig",
    "LookupConfig",
    "OptionError",
    "SpecError",
    "SpecGenerateOutput",
    "SpecStats",
    "StrategyConfig",
    "TreeConfig",
    "UnsupportedError",
    "disable",
    "enable",
    "known_strategies",
    "truncated_draft",
]

enable()

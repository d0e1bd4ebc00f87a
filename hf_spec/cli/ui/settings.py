"""Where the page is, and how long its answers are."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Settings, Within


@dataclass(frozen=True)
class UiSettings(Settings):
    """The page of `hf-spec ui`.

    Attributes:
        max_new_tokens: longest answer, in tokens; the page has a slider for less.
        host: address to listen at; 0.0.0.0 lets other machines in, and nobody is asked for a key.
        port: likewise; 0 takes any that is free.
    """

    max_new_tokens: Annotated[int, Within(2)] = 128
    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 7860

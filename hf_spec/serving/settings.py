"""How a server answers."""

# Imports neither torch nor transformers, see `hf_spec.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.settings import Count, Settings, Within


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Where a server listens and how much it takes on.

    Attributes:
        host: address to listen at; 0.0.0.0 lets other machines in, and nobody is asked for a key.
        port: likewise; 0 takes any that is free.
        max_batch: most sequences at a time.
        max_waiting: requests in the queue beyond which further ones are turned away (status 429).
        max_length: longest prompt with its answer, in tokens; the model's context by default.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 8000
    max_batch: Count = 8
    max_waiting: Count = 256
    max_length: Count | None = None

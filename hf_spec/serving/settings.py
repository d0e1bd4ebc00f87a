"""Address, limits and access rules of a server."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Count, Settings, Within


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Where a server listens, who may use it, and how much it takes on.

    Attributes:
        host: address to listen at; 0.0.0.0 lets other machines in, so set an API key.
        port: port to listen at; 0 takes any that is free.
        api_key: key that requests must send as "Authorization: Bearer KEY"; the environment
            variable HF_SPEC_API_KEY by default, or else none.
        allowed_hosts: further name by which clients reach the server, for example that of a
            reverse proxy. A server on a loopback address answers loopback names and these.
        max_batch: sequences that run at a time.
        max_waiting: requests in the queue beyond which further ones are rejected (status 429).
        max_length: longest prompt with its answer, in tokens; the model's context by default, or
            32,768 where the model states none.
        max_prompt: longest prompt in tokens; as long as max_length by default.
        max_tokens: largest max_tokens of a request; by default an answer may fill max_length.
        max_stop: most stop strings of a request.
        max_stop_length: longest stop string in characters.
        max_body: largest request body in bytes; images in a request need more than the default.
        client_templates: accept a chat template in a request. A template is a program that may
            run for as long as it likes.
        management: answer /load_model and /reset, which load the model again and drop it.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 8000
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_batch: Count = 8
    max_waiting: Count = 256
    max_length: Count | None = None
    max_prompt: Count | None = None
    max_tokens: Count | None = None
    max_stop: Annotated[int, Within(0)] = 8
    max_stop_length: Count = 64
    max_body: Count = 2**20
    client_templates: bool = False
    management: bool = False

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return is_loopback(self.host)


def is_loopback(name: str) -> bool:
    """Return True for `localhost` and for the addresses of the loopback interface."""
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

"""Settings of a server, from which the help of `hf-spec serve` is built."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Count, Settings, Within


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Address, access rules and limits of a server.

    Attributes:
        host: address to listen on; 0.0.0.0 is reachable from other machines, so set an API key.
        port: port to listen on; 0 selects a free port.
        api_key: key that requests must send as "Authorization: Bearer KEY". Default: the
            environment variable HF_SPEC_API_KEY, otherwise no authentication.
        allowed_hosts: additional host name of the server, for example of a reverse proxy. A server
            on a loopback address accepts only loopback names and these.
        max_batch: maximum number of running sequences.
        max_waiting: maximum number of waiting requests; more are rejected (status 429).
        max_length: maximum tokens of prompt and output. Default: the model's context, or 32,768 if
            the model has no limit.
        max_prompt: maximum tokens of a prompt. Default: max_length.
        max_tokens: maximum max_tokens of a request. Default: up to max_length.
        max_stop: maximum number of stop strings.
        max_stop_length: maximum characters of a stop string.
        max_body: maximum bytes of a request body; requests with images need more than the default.
        client_templates: accept chat templates in requests. A template is a program whose run time
            is not limited.
        management: enable /load_model and /reset, which reload and unload the model.
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


def is_loopback(name: str) -> bool:
    """Return True for `localhost` and for the addresses of the loopback interface."""
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

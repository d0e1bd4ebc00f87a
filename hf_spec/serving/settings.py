"""Settings of a server, from which the help of `hf-spec serve` is built."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hf_spec.common.settings import Count, Named, Settings, Within


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Address, access rules and limits of a server.

    Attributes:
        host: address to listen on; 0.0.0.0 is reachable from other machines, so set an API key.
        port: port to listen on; 0 selects a free port.
        api_key: key that requests must send. The header is "Authorization: Bearer KEY". Default:
            the variable HF_SPEC_API_KEY, otherwise no authentication.
        allowed_hosts: further host name of the server, such as that of a proxy. A server on a
            loopback address accepts only loopback names and these.
        max_batch: running sequences.
        max_waiting: waiting requests; more are rejected (status 429).
        max_length: tokens of prompt and output. Default: the model's context, or 32,768 if it has
            no limit.
        max_prompt: tokens of a prompt. Default: --max-model-len.
        max_tokens: new tokens of a request. Default: up to --max-model-len.
        max_stop: number of stop strings.
        max_stop_length: characters of a stop string.
        max_body: bytes of a request body. Requests with images need more than the default.
        client_templates: accept chat templates in requests, programs whose run time is not limited.
        management: enable /load_model and /reset, which reload and unload the model.
    """

    panel = "Server"
    other_panels: ClassVar = {
        "Maximum": (
            *("max_batch", "max_waiting", "max_length", "max_prompt", "max_tokens"),
            *("max_stop", "max_stop_length", "max_body"),
        )
    }

    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 8000
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_batch: Annotated[Count, Named("max_num_seqs")] = 8
    max_waiting: Count = 256
    max_length: Annotated[Count | None, Named("max_model_len")] = None
    max_prompt: Annotated[Count | None, Named("max_prompt_tokens")] = None
    max_tokens: Annotated[Count | None, Named("max_new_tokens")] = None
    max_stop: Annotated[int, Within(0)] = 8
    max_stop_length: Count = 64
    max_body: Count = 2**20
    client_templates: Annotated[bool, Named("trust_request_chat_template")] = False
    management: bool = False


def is_loopback(name: str) -> bool:
    """Return True for `localhost` and for the addresses of the loopback interface."""
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

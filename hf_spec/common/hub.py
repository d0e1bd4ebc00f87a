"""Loading of models by name: a folder, or a repository of the Hugging Face Hub.

huggingface_hub retries every file six times with growing pauses, so this module checks once that
the Hub is reachable. Names are checked without importing transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id

from hf_spec.common.errors import HubError, OptionError

# Seconds to wait for a response.
TIMEOUT = 5.0
# Statuses from here on are failures of the Hub or a proxy, which huggingface_hub would retry.
SERVER_ERROR = 500


def check_name(name: str) -> None:
    """Raise `OptionError` for a name that is neither a folder nor a valid repository id."""
    if not name.strip():
        raise OptionError(f"{name!r} is not a model name; use a folder or a Hub id")
    if Path(name).is_dir():
        return
    if Path(name).exists():
        raise OptionError(f"{name} is a file; use its folder")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(f"there is no folder {name}") from error


def reach_hub() -> None:
    """Check once that the Hub is reachable; raises `HubError` with the reason."""
    try:
        response = get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:
        # The HTTP library, and so its error classes, depends on the version of huggingface_hub.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HubError(f"the Hub at {constants.ENDPOINT} cannot be reached ({reason})") from error
    if response.status_code >= SERVER_ERROR:
        raise HubError(
            f"the Hub at {constants.ENDPOINT} is out of order (status {response.status_code})"
        )


def load_named(kind: Any, name: str, **arguments: Any) -> Any:
    """Return `kind.from_pretrained` from a folder, the Hub, or the cache if it is unreachable.

    A model's own code is never run.
    """
    from transformers import AutoModelForCausalLM

    check_name(name)
    # By default transformers asks on the terminal whether to run a model's own code.
    arguments["trust_remote_code"] = False
    if Path(name).is_dir():
        return kind.from_pretrained(name, **arguments)
    try:
        reach_hub()
    except HubError as unreachable:
        cached: dict[str, Any] = {"local_files_only": True}
        if kind is AutoModelForCausalLM:
            # It first looks for an adapter, without passing the argument on.
            cached["adapter_kwargs"] = cached.copy()
        try:
            return kind.from_pretrained(name, **cached, **arguments)
        except OSError:
            raise HubError(
                f"{name} is neither a folder nor in the cache, and {unreachable}"
            ) from unreachable
    return kind.from_pretrained(name, **arguments)

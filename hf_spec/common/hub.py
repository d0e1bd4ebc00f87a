"""Models that are named: a folder, or a repository of the Hugging Face Hub.

For every file, huggingface_hub asks a Hub that does not answer six times, with growing pauses: most
of a minute for a model that is not there. Here it is asked once, before anything is loaded. Names
are checked without transformers, so that the command line answers a wrong one at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id

from hf_spec.common.errors import HubError, OptionError

# Seconds to wait for an answer.
PATIENCE = 5.0
# A status of its own or of a proxy on the way, which huggingface_hub would wait for to pass.
OUT_OF_ORDER = 500


def check_name(name: str) -> None:
    """Refuse what is no folder and cannot be the id of a repository, OWNER/NAME."""
    if not name.strip():
        raise OptionError(f"{name!r} names no model; give a folder or a Hub id")
    if Path(name).is_dir():
        return
    if Path(name).exists():
        raise OptionError(f"{name} is a file; give the folder that it is in")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(f"there is no folder {name}") from error


def reach_hub() -> None:
    """Ask the Hub once whether it answers; `HubError` says why if it does not."""
    try:
        answer = get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:
        # The library that speaks HTTP, and with it the classes of its errors, depends on the
        # version of huggingface_hub.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HubError(f"the Hub at {constants.ENDPOINT} cannot be reached ({reason})") from error
    if answer.status_code >= OUT_OF_ORDER:
        raise HubError(
            f"the Hub at {constants.ENDPOINT} is out of order (status {answer.status_code})"
        )


def load_named(kind: Any, name: str, **arguments: Any) -> Any:
    """`kind.from_pretrained` of a folder, of the Hub, or of the cache if it cannot be reached.

    Raises:
        OptionError: if `name` can only be a folder, and there is none.
        HubError: if the Hub cannot be reached and what is asked for is not in the cache.
    """
    from transformers import AutoModelForCausalLM

    check_name(name)
    if Path(name).is_dir():
        return kind.from_pretrained(name, **arguments)
    try:
        reach_hub()
    except HubError as unreachable:
        cached: dict[str, Any] = {"local_files_only": True}
        if kind is AutoModelForCausalLM:
            # It looks for an adapter first, and does not hand on what it was told.
            cached["adapter_kwargs"] = cached.copy()
        try:
            return kind.from_pretrained(name, **cached, **arguments)
        except OSError:
            raise HubError(
                f"{name} is neither a folder nor in the cache, and {unreachable}"
            ) from unreachable
    return kind.from_pretrained(name, **arguments)

"""What the `custom_generate/generate.py` of an adapter calls."""

from __future__ import annotations

import inspect
from typing import Any, cast

from transformers import PreTrainedModel

from hf_spec.adapters.folder import load_adapter
from hf_spec.common.errors import AssistantError
from hf_spec.methods.loading import read_once


def custom_generate(
    model: PreTrainedModel, revision: str | None = None, token: Any = None, **arguments: Any
) -> Any:
    """`model.generate()` with the adapter whose repository holds the code that was called.

    `revision` is a branch, tag or commit of the repository, if it is on the Hub, and `token` that
    of the Hub, by default the stored one.

    Raises:
        AssistantError: if the adapter cannot be used with `model`.
    """
    name, target = _repository(), cast("Any", model)
    adapter = read_once(
        model,
        "custom_generate",
        f"{name}@{revision}" if revision else name,
        lambda: load_adapter(name, revision=revision, token=token),
    )
    return target.generate(spec_strategy=adapter.strategy, assistant=adapter, **arguments)


def _repository() -> str:
    """The folder or Hub id that `custom_generate=` named.

    The function is given everything but this, and its file has been copied elsewhere; the call of
    transformers' `generate` further up knows.
    """
    frame = inspect.currentframe()
    while frame is not None:
        named = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(named, str):
            return named
        frame = frame.f_back
    raise AssistantError(
        "this function is called by model.generate(custom_generate=<adapter>, "
        "trust_remote_code=True); elsewhere pass spec_strategy= and assistant= to generate()"
    )

"""Function that the `custom_generate/generate.py` of an adapter repository calls."""

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
    """Run `model.generate()` with the adapter whose repository contains the called code.

    `revision` is a branch, tag or commit of a repository on the Hub, and `token` the Hub's, by
    default the stored one.
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
    """Return the folder or Hub id that was passed as `custom_generate=`.

    transformers copies the file elsewhere and passes all arguments except this one, so it is read
    from the frame of `generate`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(name, str):
            return name
        frame = frame.f_back
    raise AssistantError(
        "this function is called by model.generate(custom_generate=<adapter>, "
        "trust_remote_code=True); elsewhere pass spec_strategy= and assistant= to generate()"
    )

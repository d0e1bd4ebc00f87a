"""Names of a model: on this machine, and on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from hf_spec.common.small_models import hub_id_of

# Folder of a model in the Hub's cache: <prefix><owner>--<name>/snapshots/<commit>.
CACHE_PREFIX = "models--"


def is_hub_id(name: str) -> bool:
    """Return True if `name` has the form "owner/name" of a Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def local_name(model: PreTrainedModel) -> str:
    """Return the last part of the folder or Hub id of `model`, or its class name."""
    return os.path.basename(os.path.normpath(_source(model)))


def base_name(model: PreTrainedModel) -> str:
    """Return the Hub id of `model` if that is known, or its local name.

    The id is known for models that were loaded by id, from the Hub's cache, or from a folder that
    `hf_spec.common.small_models` converted.
    """
    source = _source(model)
    if not os.path.isdir(source):
        return source if is_hub_id(source) else local_name(model)
    folder = Path(source).absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(CACHE_PREFIX):
        return repository.removeprefix(CACHE_PREFIX).replace("--", "/")
    return hub_id_of(folder) or local_name(model)


def source_path(model: PreTrainedModel) -> str:
    """Return the absolute folder or the Hub id that `model` was loaded from, or its class name."""
    source = _source(model)
    return os.path.realpath(source) if os.path.isdir(source) else source


def _source(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path or type(model).__name__)

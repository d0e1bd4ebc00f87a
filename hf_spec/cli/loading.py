"""Loading the target that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_spec.adapters.folder import is_adapter
from hf_spec.cli.options import Placement
from hf_spec.common.errors import OptionError, SpecError
from hf_spec.common.hub import load_named
from hf_spec.training.trainer import processes

ANYWHERE = Placement()


def load_target(name: str, placement: Placement = ANYWHERE) -> PreTrainedModel:
    """The model `name`, a folder or Hub id, in evaluation mode.

    With dtype "auto" it is as it is stored, but float32 on a CPU, where outputs are equal token by
    token, few processors compute in bfloat16 and long forwards in float16 are several times slower.
    By default it is on the GPU of this process, if there is one.

    Raises:
        OptionError: if there is no such model or device.
        HubError: if the model must be fetched and the Hub cannot be reached.
    """
    place, dtype = device_and_dtype(placement)
    if Path(name).is_dir() and is_adapter(name):
        raise OptionError(
            f"{name} is an adapter, not a model; name its base as the model, and the adapter "
            f"after a strategy: --strategy NAME@{name}"
        )
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    model: Any = _load(AutoModelForCausalLM, name, dtype=kind, use_safetensors=True)
    return model.to(place).eval()


def device_and_dtype(placement: Placement) -> tuple[torch.device, str]:
    """Where a model goes and the name of its dtype or "auto"; see `load_target`."""
    place, dtype = _device(placement.device), placement.dtype
    return place, "float32" if dtype == "auto" and place.type == "cpu" else dtype


def load_tokenizer(name: str) -> Any:
    """The tokenizer of the model `name`; errors are those of `load_target`."""
    return _load(AutoTokenizer, name)


def own_device() -> torch.device:
    """The GPU of this process, counted on its machine; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", processes().local_process_index)


def _device(name: str | None) -> torch.device:
    try:
        place = torch.device(name) if name else own_device()
    except RuntimeError as error:
        raise OptionError(f"--device {name}: choose cpu, cuda or cuda:1") from error
    if place.type == "meta":
        raise OptionError(f"--device {name} keeps no weights; choose cpu, cuda or cuda:1")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"--device {name}: torch finds no GPU here; choose cpu")
    try:
        torch.empty(1, device=place)
    # Each kind of device says in its own way that it is not there.
    except (AssertionError, ImportError, RuntimeError) as error:
        raise OptionError(
            f"--device {name}: torch has no such device here; choose cpu, cuda or cuda:1"
        ) from error
    return place


def _load(kind: Any, name: str, **arguments: Any) -> Any:
    try:
        # Left open, transformers would ask on the terminal whether to run a model's own code.
        return load_named(kind, name, trust_remote_code=False, **arguments)
    except SpecError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        what = kind.__name__.removeprefix("Auto")
        raise OptionError(
            f"{name} cannot be loaded as {what}: {str(error).splitlines()[0]}"
        ) from error

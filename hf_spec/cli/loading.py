"""Loading of the target model of a command."""

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
from hf_spec.common.machine import accelerator
from hf_spec.training.trainer import processes

DEFAULT_PLACEMENT = Placement()

DEVICES = "choose cpu, cuda, cuda:1, mps or xpu"


def load_target(name: str, placement: Placement = DEFAULT_PLACEMENT) -> PreTrainedModel:
    """Return the model `name`, a folder or Hub id, in evaluation mode.

    The dtype "auto" is that of the checkpoint, but float32 on a CPU: there outputs are identical,
    few processors have bfloat16 instructions, and long forward passes in float16 are slow. The
    default device is the GPU of this process, if there is one.

    A missing model or device raises `OptionError`; an unreachable Hub raises `HubError`.
    """
    device, dtype = device_and_dtype(placement)
    if Path(name).is_dir() and is_adapter(name):
        raise OptionError(
            f"{name} is an adapter, not a model; use its base as the model, and the adapter as "
            f"--strategy NAME@{name}"
        )
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    model: Any = _load(AutoModelForCausalLM, name, dtype=kind, use_safetensors=True)
    return model.to(device).eval()


def device_and_dtype(placement: Placement) -> tuple[torch.device, str]:
    """Return the device of a model and the name of its dtype or "auto"; see `load_target`."""
    device, dtype = _device(placement.device), placement.dtype
    return device, "float32" if dtype == "auto" and device.type == "cpu" else dtype


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of the model `name`; raises the errors of `load_target`."""
    return _load(AutoTokenizer, name)


def own_device() -> torch.device:
    """Return the accelerator with the local index of this process, or the CPU without one."""
    device = accelerator()
    if device is None:
        return torch.device("cpu")
    return torch.device(device.type, processes().local_process_index)


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name) if name else own_device()
    except RuntimeError as error:
        raise OptionError(f"--device {name}: {DEVICES}") from error
    if device.type == "meta":
        raise OptionError(f"--device {name} stores no weights; {DEVICES}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"--device {name}: torch finds no GPU here; choose cpu")
    try:
        torch.empty(1, device=device)
    # The error of a missing device depends on its type.
    except (AssertionError, ImportError, RuntimeError) as error:
        raise OptionError(f"--device {name}: torch has no such device here; {DEVICES}") from error
    return device


def _load(kind: Any, name: str, **arguments: Any) -> Any:
    try:
        return load_named(kind, name, **arguments)
    except SpecError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        what = kind.__name__.removeprefix("Auto")
        raise OptionError(
            f"{name} cannot be loaded as {what}: {str(error).splitlines()[0]}"
        ) from error

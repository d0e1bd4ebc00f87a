"""What the commands of `hf-spec train` and `hf-spec calibrate` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.errors import SpecError

Model = Annotated[str, typer.Option(help="The target model: folder or Hub id.")]
Responses = Annotated[
    Path, typer.Option(exists=True, help="The target's answers, from `hf-spec train responses`.")
]
Dtype = Annotated[str, typer.Option(help="Of the target: float32, bfloat16 or float16.")]


def load_target(name: str, dtype: str) -> PreTrainedModel:
    """The model `name` in evaluation mode, on the accelerator if there is one."""
    if dtype not in {"float32", "bfloat16", "float16"}:
        raise typer.BadParameter(f"--dtype {dtype}: choose float32, bfloat16 or float16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, dtype), use_safetensors=True
    )
    return model.to(device).eval()


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Say what is wrong without a traceback."""
    try:
        yield
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error

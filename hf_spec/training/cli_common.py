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
from hf_spec.training.responses import Response, read_responses

Model = Annotated[str, typer.Option(help="The target model: folder or Hub id.")]
Responses = Annotated[
    Path, typer.Option(exists=True, help="The target's answers, from `hf-spec train responses`.")
]
ResponseFiles = Annotated[
    list[Path],
    typer.Option(exists=True, help="Answers of `hf-spec train responses`; may be repeated."),
]
AdapterOut = Annotated[
    Path, typer.Option(help="Folder for the adapter; an interrupted run resumes.")
]
Vocabulary = Annotated[
    int, typer.Option(min=0, help="Most frequent tokens it can propose; 0 for all.")
]
Epochs = Annotated[int, typer.Option(min=1)]
LearningRate = Annotated[float, typer.Option(min=0)]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")]
EvaluateEvery = Annotated[int, typer.Option(min=1, help="In steps.")]
Seed = Annotated[int, typer.Option(help="Of the order and of every random number.")]
TeacherFolder = Annotated[
    Path | None, typer.Option(help="Folder for the target's opinions; beside the answers.")
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


def answer_files(
    files: list[Path], folder: Path | None, kind: str
) -> Iterator[tuple[list[Response], Path]]:
    """The answers of each file, and the folder for what is computed from them.

    Args:
        files: of `hf-spec train responses`.
        folder: has a folder for each file; by default they lie beside the files.
        kind: of what is computed; ends the name of a folder beside its file.
    """
    for file in files:
        own = file.with_suffix(f".{kind}") if folder is None else folder / file.stem
        yield list(read_responses(file)), own


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Say what is wrong without a traceback."""
    try:
        yield
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error

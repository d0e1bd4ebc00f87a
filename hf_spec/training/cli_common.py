"""What the commands of `hf-spec train` and `hf-spec calibrate` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.training.responses import Response, read_responses
from hf_spec.training.trainer import processes

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
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the answers.")]
LearningRate = Annotated[
    float, typer.Option(min=0, help="Highest; rises over the first steps, falls to a tenth.")
]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, padding included.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")]
EvaluateEvery = Annotated[
    int, typer.Option(min=1, help="Steps between two looks at the answers held back.")
]
Seed = Annotated[int, typer.Option(help="Of the order and of every random number.")]
TeacherFolder = Annotated[
    Path | None, typer.Option(help="Folder for the target's opinions; beside the answers.")
]
Dtype = Annotated[str, typer.Option(help="Of the target: float32, bfloat16 or float16.")]


def load_target(name: str, dtype: str, device: str | None = None) -> PreTrainedModel:
    """The model `name` in evaluation mode.

    Args:
        name: folder or Hub id.
        dtype: "float32", "bfloat16", "float16", or "auto" for the one it is stored in.
        device: of torch; the accelerator, if there is one, by default.

    Raises:
        typer.BadParameter: for another dtype, or a device that torch does not know.
    """
    if dtype not in {"auto", "float32", "bfloat16", "float16"}:
        raise typer.BadParameter(f"--dtype {dtype}: choose float32, bfloat16 or float16")
    try:
        place = torch.device(device) if device else own_device()
    except RuntimeError as error:
        raise typer.BadParameter(f"--device {device}: choose cpu, cuda or cuda:1") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: torch finds no GPU here; choose cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        use_safetensors=True,
        # Left open, transformers would ask on the terminal whether to run a model's own code.
        trust_remote_code=False,
    )
    return model.to(place).eval()


def own_device() -> torch.device:
    """The GPU of this process, counted on its machine; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", processes().local_process_index)


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

"""One training loop for every method: deterministic, resumable, and data-parallel.

A step sums the losses of its micro-batches over all processes and divides by their tokens, so the
result does not depend on how a batch is split. Batches are a function of their index and random
numbers are seeded by the step, so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, parse_flag_from_env
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.common.files import atomic_write, write_json
from hf_spec.common.machine import environment, has_bfloat16
from hf_spec.training.answers import LEARNED_FROM, agrees, read_metadata
from hf_spec.training.settings import TrainSettings

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
RUN = "run.json"
# `environment` has the versions of torch, transformers and hf_spec.
PACKAGES = ("accelerate", "huggingface_hub", "peft", "safetensors", "tokenizers")
# Name of the project in which a tracker collects the runs.
TRACKED = "hf-spec"
HALF = (torch.bfloat16, torch.float16)
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("options", default=None)

Item = TypeVar("Item")

# (summed loss, number of tokens)
Loss = tuple[Tensor, int]


@dataclass(frozen=True)
class MicroBatch(Generic[Item]):
    """Texts or examples of one forward and backward pass, in an epoch counted from 0.

    `seed` is that of all its random numbers, independent of the process that runs it. `done` is the
    share of the run before it.
    """

    items: Sequence[Item]
    epoch: int = 0
    seed: int = 0
    done: float = 0.0


def train(  # noqa: PLR0913 - parameters, data, loss, settings and evaluation
    parameters: Mapping[str, nn.Parameter],
    loss: Callable[[Any], Loss],
    epochs: Callable[[int], Sequence[Any]],
    settings: TrainSettings,
    folder: Path,
    evaluate: Callable[[], dict[str, float]] = dict,
    facts: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Train `parameters` in place, resuming from the checkpoint in `folder` if there is one.

    Args:
        parameters: trained parameters by name; converted to float32.
        loss: returns the summed loss of a micro-batch and its number of tokens.
        epochs: epoch -> its micro-batches in order, the same on every call.
        settings: rates, lengths and seed.
        folder: gets `metrics.jsonl` (one JSON object per line), `run.json` and the checkpoint.
        evaluate: returns figures on the held-out set; the last ones are returned.
        facts: what a checkpoint must agree with besides `settings`.

    A checkpoint of a run with other settings raises `OptionError`; processes that are set up to
    shard the trained parameters raise `UnsupportedError`.
    """
    trained = list(parameters.values())
    accelerator = _accelerator(trained[0].device, settings.log_with, folder)
    _check_whole(accelerator, trained)
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(
        trained, lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    folder.mkdir(parents=True, exist_ok=True)
    resolved = {**settings.recorded, **(facts or {})}
    run = {"settings": json.dumps(resolved, sort_keys=True)}
    done = _load(folder, parameters, optimizer, run)
    # Epochs may differ in length: texts are shuffled before they are grouped by length.
    steps = [
        batches[start : start + settings.accumulate]
        for batches in map(epochs, range(settings.epochs))
        for start in range(0, len(batches), settings.accumulate)
    ]
    num_steps, main = len(steps), accelerator.is_main_process
    if main:
        _cut_metrics(folder / METRICS, done)
    if main and done < num_steps:
        record_start(folder, resolved, done, accelerator.device)
    accelerator.init_trackers(TRACKED, {name: _plain(value) for name, value in resolved.items()})
    bar = tqdm(total=num_steps, initial=done, desc="steps", disable=None if main else True)
    figures: dict[str, float] = {}
    for step, batches in enumerate(steps[done:], start=done):
        torch.manual_seed(settings.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, num_steps)
        start = time.perf_counter()
        share = batches[accelerator.process_index :: accelerator.num_processes]
        losses = map(loss, share)
        total, tokens = optimizer_step(accelerator, optimizer, trained, losses, settings.clip)
        last = step + 1 == num_steps
        row: dict[str, float] = {"step": step + 1, "loss": total / max(tokens, 1)}
        if last or (step + 1) % settings.evaluate_every == 0:
            figures = evaluate()
            row |= figures
        if main:
            row["seconds"] = round(time.perf_counter() - start, 3)
            line = {**row, "tokens": tokens, "rate": settings.rate(step, num_steps)}
            with (folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            accelerator.log({k: v for k, v in line.items() if k != "step"}, step=step + 1)
            if last or (step + 1) % settings.save_every == 0:
                _save(folder, parameters, optimizer, {**run, "step": str(step + 1)})
        bar.set_postfix({k: f"{v:.3f}" for k, v in row.items() if k != "step"}, refresh=False)
        bar.update()
    bar.close()
    # Not `end_training`, which ends the process group, too.
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()
    # A finished run that is started again takes no step.
    return figures if done < num_steps else evaluate()


def optimizer_step(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    losses: Iterable[Loss],
    clip: float = 1.0,
) -> tuple[float, int]:
    """Take one optimizer step; return the summed loss and the tokens of all processes."""
    # MPS has no float64.
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    counts = torch.zeros(2, device=accelerator.device, dtype=dtype)
    for value, tokens in losses:
        accelerator.backward(value)
        counts += torch.tensor([float(value.detach()), tokens]).to(counts)
    counts = accelerator.reduce(counts, "sum")
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = accelerator.reduce(parameter.grad, "sum") / max(float(counts[1]), 1.0)
    nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(counts[0]), int(counts[1])


def _accelerator(device: torch.device, log_with: str | None, folder: Path) -> Accelerator:
    """Return the accelerator of a run; a tracker without its package raises `OptionError`."""
    # accelerate skips trackers that are not installed.
    if log_with is not None and log_with not in map(str, get_available_trackers()):
        raise OptionError(
            f"log_with={log_with!r} needs the package {log_with!r}: pip install {log_with}; "
            f"without it, losses are in {folder / METRICS}"
        )
    return Accelerator(cpu=device.type == "cpu", log_with=log_with, project_dir=folder)


def _plain(value: Any) -> Any:
    """Return a setting as trackers store it."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def processes() -> PartialState:
    """Return the processes of this run, even before a training starts."""
    # Without an accelerator, accelerate connects processes only with cpu=True.
    return PartialState(cpu=not torch.accelerator.is_available())


def save_trained(folder: Path, adapter: SpecAdapter) -> SpecAdapter:
    """Write an adapter and its card, in the main process; return the adapter."""
    if processes().is_main_process:
        save_with_card(folder, adapter)
    return adapter


def _check_whole(accelerator: Accelerator, parameters: Sequence[nn.Parameter]) -> None:
    sharing = [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM]
    # On a CPU accelerate ignores the options of its launcher.
    requested = [kind for kind in sharing if parse_flag_from_env(f"ACCELERATE_USE_{kind.value}")]
    requested += [kind for kind in sharing if kind is accelerator.distributed_type]
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    if requested or is_sharded:
        kind = requested[0].value if requested else "tensor parallelism"
        raise UnsupportedError(
            f"sharded training ({kind}) is not supported: each process needs all trained weights; "
            "start data-parallel processes with torchrun or accelerate launch --multi_gpu"
        )


def shuffled_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return batches of text indices with similar lengths, in an order fixed by seed and epoch.

    A batch has at most `batch_tokens` tokens after padding to its longest text; a single text may
    be longer.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = [[]]
    # Sorted within shuffled chunks, so batches differ from epoch to epoch.
    chunk = 2048
    for start in range(0, len(order), chunk):
        for index in sorted(order[start : start + chunk], key=lambda i: lengths[i]):
            batch = batches[-1]
            if batch and (len(batch) + 1) * max(lengths[batch[-1]], lengths[index]) > batch_tokens:
                batches.append([])
            batches[-1].append(index)
    shuffle = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in shuffle if batches[index]]


def micro_batches(
    items: Sequence[Item], lengths: Sequence[int], settings: TrainSettings
) -> Callable[[int], list[MicroBatch[Item]]]:
    """Return the `epochs` of `train`: shuffled items of similar lengths, each batch with a seed."""

    def epochs(epoch: int) -> list[MicroBatch[Item]]:
        batches = shuffled_batches(lengths, settings.batch_tokens, settings.seed, epoch)
        first = (settings.seed * 1009 + epoch) * 1_000_003
        micro = []
        for index, batch in enumerate(batches):
            done = (epoch + index / len(batches)) / settings.epochs
            micro.append(MicroBatch([items[i] for i in batch], epoch, first + index, done))
        return micro

    return epochs


def _cut_metrics(path: Path, done: int) -> None:
    """Truncate a file of JSON lines to the `done` steps of a checkpoint."""
    lines = path.read_text().splitlines() if path.exists() and done else []
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= done]
    path.write_text("".join(line + "\n" for line in kept))


def _save(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    facts: dict[str, str],
) -> None:
    """Write a checkpoint with the value and the AdamW state of each parameter."""
    tensors = {
        f"{name}.{key}": tensor.cpu().contiguous()
        for name, parameter in parameters.items()
        for key, tensor in {"value": parameter.detach(), **optimizer.state[parameter]}.items()
    }
    with atomic_write(folder / CHECKPOINT) as part:
        save_file(tensors, part, metadata=facts)


def _load(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: Any, run: Any) -> int:
    """Resume from a checkpoint, if there is one, and return the number of its steps."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    facts = read_metadata(path, remedy := "delete it to train from the beginning")
    if not {"step", "settings"} <= facts.keys():
        raise OptionError(f"{path} is not a checkpoint of a training; {remedy}")
    step = int(facts.pop("step"))
    before, now = json.loads(facts["settings"]), json.loads(run["settings"])
    # Checkpoints of older versions have no training data.
    before = {**{name: now[name] for name in LEARNED_FROM if name in now}, **before}
    names = sorted({*before, *now})
    if differing := [k for k in names if not agrees(k, before.get(k), now.get(k))]:
        changes = {k: f"{k}={before.get(k)!r} (now {now.get(k)!r})" for k in differing}
        if "weights" in changes:
            changes["weights"] = f"other weights of {before.get('target')!r}"
        raise OptionError(
            f"{path} comes from a run with other settings: {', '.join(changes.values())}; use "
            "them, or another folder"
        )
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for key, tensor in load_file(path).items():
        name, _, part = key.rpartition(".")
        # AdamW keeps its step counter on the host.
        states[name][part] = tensor if part == "step" else tensor.to(parameters[name].device)
    for name, parameter in parameters.items():
        parameter.data.copy_(states[name].pop("value"))
        optimizer.state[parameter] = states[name]
    return step


def mixed_precision(model: PreTrainedModel) -> torch.autocast:
    """Return autocast to bfloat16, disabled for float32 models on CPUs without bfloat16.

    Those CPUs emulate bfloat16 matmuls, which is several times slower than float32.
    """
    # Half-precision models need autocast to combine weights and states of different dtypes.
    enabled = model.device.type != "cpu" or model.dtype in HALF or has_bfloat16()
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)


@contextmanager
def with_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Add `options`, all options of the command, to the run records of starts within."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def record_start(
    folder: Path, settings: Mapping[str, Any], step: int, device: torch.device
) -> None:
    """Add this start, after `step` steps, to those in the run record beside a checkpoint."""
    path = folder / RUN
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "options": _options.get(),
        "settings": settings,
        "step": step,
        "environment": environment(device),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    # default=str writes paths as the user typed them.
    write_json(path, {"starts": [*starts, start]}, default=str)

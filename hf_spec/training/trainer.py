"""One training loop for every method: deterministic, resumable, the same on several processes.

A step adds up the losses of its micro-batches, and of all processes, before it divides by the
number of tokens they stand for; so the result does not depend on how a batch is cut up. Batches
are a function of their index and random numbers are seeded by the step: a run that was interrupted
and goes on equals one that was not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.common.files import atomic_write
from hf_spec.training.answers import LEARNED_FROM, agrees, read_metadata
from hf_spec.training.run_record import record_start
from hf_spec.training.settings import TrainSettings

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"

Item = TypeVar("Item")

# (sum of the losses, number of tokens they belong to)
Loss = tuple[Tensor, int]


@dataclass(frozen=True)
class MicroBatch(Generic[Item]):
    """Items of a pass, in an `epoch` counted from 0, with the share of the run `done` before them.

    `seed` is that of every random number that they meet, so it does not matter who runs them.
    """

    items: Sequence[Item]
    epoch: int = 0
    seed: int = 0
    done: float = 0.0


def train(  # noqa: PLR0913 - what learns, from what, how, and what is told
    parameters: Mapping[str, nn.Parameter],
    loss: Callable[[Any], Loss],
    epochs: Callable[[int], Sequence[Any]],
    settings: TrainSettings,
    folder: Path,
    evaluate: Callable[[], dict[str, float]] = dict,
    facts: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Train `parameters` in place, going on from the checkpoint in `folder` if there is one.

    Args:
        parameters: what is trained; turned into float32.
        loss: the summed loss of a micro-batch and its number of tokens.
        epochs: epoch -> its micro-batches in order, the same whenever it is asked.
        settings: rates, lengths and seed.
        folder: receives `metrics.jsonl` (one JSON object a line), `run.json` and the checkpoint.
        evaluate: figures on held-back data, which are returned for the trained parameters.
        facts: what a checkpoint must agree with beside `settings`.

    Raises:
        OptionError: if the checkpoint comes from a run with other settings.
        UnsupportedError: if the processes were started to share what is trained.
    """
    trained = list(parameters.values())
    accelerator = Accelerator(cpu=trained[0].device.type == "cpu")
    _check_whole(accelerator, trained)
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(
        trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    folder.mkdir(parents=True, exist_ok=True)
    resolved = {**asdict(settings), **(facts or {})}
    run = {"settings": json.dumps(resolved, sort_keys=True)}
    done = _load(folder, parameters, optimizer, run)
    # Texts are shuffled before those of like lengths are put together: epochs may differ in length.
    steps = [
        batches[start : start + settings.accumulate]
        for batches in map(epochs, range(settings.epochs))
        for start in range(0, len(batches), settings.accumulate)
    ]
    num_steps = len(steps)
    main = accelerator.is_main_process
    if main:
        _cut_metrics(folder / METRICS, done)
    if main and done < num_steps:
        record_start(folder, resolved, done, accelerator.device)
    bar = tqdm(total=num_steps, initial=done, desc="steps", disable=None if main else True)
    figures: dict[str, float] = {}
    for step, batches in enumerate(steps[done:], start=done):
        torch.manual_seed(settings.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, num_steps)
        start = time.perf_counter()
        mine = batches[accelerator.process_index :: accelerator.num_processes]
        total, tokens = _step(accelerator, optimizer, trained, map(loss, mine), settings.clip)
        last = step + 1 == num_steps
        row: dict[str, float] = {"step": step + 1, "loss": total / max(tokens, 1)}
        if last or (step + 1) % settings.evaluate_every == 0:
            figures = evaluate()
            row |= figures
        if main:
            row["seconds"] = round(time.perf_counter() - start, 3)
            told = {**row, "tokens": tokens, "rate": settings.rate(step, num_steps)}
            with (folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
            if last or (step + 1) % settings.save_every == 0:
                _save(folder, parameters, optimizer, {**run, "step": str(step + 1)})
        bar.set_postfix({k: f"{v:.3f}" for k, v in row.items() if k != "step"}, refresh=False)
        bar.update()
    bar.close()
    accelerator.wait_for_everyone()
    # A finished run that is started again took no step.
    return figures if done < num_steps else evaluate()


def processes() -> PartialState:
    """The processes of this run, also before a training begins."""
    # Without a GPU accelerate takes processes for one another's strangers unless it is told.
    return PartialState(cpu=not torch.cuda.is_available())


def save_trained(folder: Path, adapter: SpecAdapter) -> SpecAdapter:
    """Write an adapter and its card, once for all processes; the adapter itself."""
    if processes().is_main_process:
        save_with_card(folder, adapter)
    return adapter


def _check_whole(accelerator: Accelerator, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what would divide the weights that are trained among the processes."""
    sharing = [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM]
    # On a CPU accelerate passes over what its launcher was told.
    asked = [kind for kind in sharing if parse_flag_from_env(f"ACCELERATE_USE_{kind.value}")]
    asked += [kind for kind in sharing if kind is accelerator.distributed_type]
    divided = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    if asked or divided:
        kind = asked[0].value if asked else "tensor parallelism"
        raise UnsupportedError(
            f"the processes are to share the weights ({kind}), but "
            "each needs all of the little that is trained here, and they add up its gradients; "
            "start them with torchrun or accelerate launch --multi_gpu"
        )


def _step(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    losses: Iterable[Loss],
    clip: float,
) -> tuple[float, int]:
    """One optimizer step; the summed loss and the tokens of all processes."""
    counts = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
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


def shuffled_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Indices of texts in batches of like lengths, in an order that the seed and epoch fix.

    A batch has at most `batch_tokens` once its texts are padded to the longest; a single text may
    be longer.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = [[]]
    # Sorting whole chunks keeps batches different from epoch to epoch.
    chunk = 2048
    for start in range(0, len(order), chunk):
        for index in sorted(order[start : start + chunk], key=lambda i: lengths[i]):
            batch = batches[-1]
            if batch and (len(batch) + 1) * max(lengths[batch[-1]], lengths[index]) > batch_tokens:
                batches.append([])
            batches[-1].append(index)
    shuffle = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[place] for place in shuffle if batches[place]]


def micro_batches(
    items: Sequence[Item], lengths: Sequence[int], settings: TrainSettings
) -> Callable[[int], list[MicroBatch[Item]]]:
    """What `train` takes as `epochs`: shuffled items of like lengths, each batch with its seed."""

    def epochs(epoch: int) -> list[MicroBatch[Item]]:
        batches = shuffled_batches(lengths, settings.batch_tokens, settings.seed, epoch)
        first = (settings.seed * 1009 + epoch) * 1_000_003
        return [
            MicroBatch(
                [items[index] for index in batch],
                epoch,
                first + place,
                (epoch + place / len(batches)) / settings.epochs,
            )
            for place, batch in enumerate(batches)
        ]

    return epochs


def _cut_metrics(path: Path, done: int) -> None:
    """Cut a file of JSON lines back to the step that a checkpoint holds."""
    kept = path.read_text().splitlines() if path.exists() and done else []
    kept = [line for line in kept if line.endswith("}") and json.loads(line)["step"] <= done]
    path.write_text("".join(line + "\n" for line in kept))


def _save(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    facts: dict[str, str],
) -> None:
    """A checkpoint: of each parameter the value and the state of AdamW."""
    tensors = {
        f"{name}.{key}": tensor.cpu().contiguous()
        for name, parameter in parameters.items()
        for key, tensor in {"value": parameter.detach(), **optimizer.state[parameter]}.items()
    }
    with atomic_write(folder / CHECKPOINT) as part:
        save_file(tensors, part, metadata=facts)


def _load(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: Any, run: Any) -> int:
    """Resume from a checkpoint, if there is one, and return the number of its steps.

    Raises:
        OptionError: if it is damaged, or of a run with other settings.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    facts = read_metadata(path, remedy := "delete it to train from the beginning")
    if not {"step", "settings"} <= facts.keys():
        raise OptionError(f"{path} is not a checkpoint of a training; {remedy}")
    step = int(facts.pop("step"))
    told, now = json.loads(facts["settings"]), json.loads(run["settings"])
    # Those of older versions do not say what was learned from.
    told = {**{name: now[name] for name in LEARNED_FROM if name in now}, **told}
    names = sorted({*told, *now})
    if differing := [k for k in names if not agrees(k, told.get(k), now.get(k))]:
        said = {k: f"{k}={told.get(k)!r} (now {now.get(k)!r})" for k in differing}
        if "weights" in said:
            said["weights"] = f"other weights of {told.get('target')!r}"
        raise OptionError(
            f"{path} comes from a run with other settings: {', '.join(said.values())}; use them, "
            "or another folder"
        )
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for key, tensor in load_file(path).items():
        name, _, part = key.rpartition(".")
        # AdamW counts its steps on the host.
        states[name][part] = tensor if part == "step" else tensor.to(parameters[name].device)
    for name, parameter in parameters.items():
        parameter.data.copy_(states[name].pop("value"))
        optimizer.state[parameter] = states[name]
    return step

"""What a round costs on a GPU and what it waits for, on models of random weights.

Run as `python -m examples.studies.gpu.rounds --help` says; `first_light` runs all of it. The models
have the sizes of published ones and say the tokens of a circle one after the other, so that lookup
accepts every draft once the circle is closed.
"""

from __future__ import annotations

import argparse
import timeit
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import hf_spec
from examples.studies.kernels.step_time import time_steps
from examples.studies.kernels.tree_attention import bandwidth
from hf_spec.backend.device.capture import cuda_graphs
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.evaluation.bench.runner import timed

NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SIZES = {
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256),
}
SMALL = {"small": (64, 128, 3, 4, 2, 512)}
# Tokens of a circle: longer than a draft, shorter than a prompt.
CIRCLE = 24
PROMPT = 100


def build(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Any:
    """A model of these sizes that says what follows in the circle, far from any tie."""
    config = LlamaConfig(
        **dict(zip(NAMES, sizes, strict=True)),
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        # Layers add little to what the embedding says.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        token = torch.arange(config.vocab_size // CIRCLE * CIRCLE, device=device)
        following = torch.where((token + 1) % CIRCLE > 0, token + 1, token + 1 - CIRCLE)
        model.lm_head.weight[following] = model.model.embed_tokens.weight[token]
    return model


def save(model: Any, folder: Path) -> None:
    """As a checkpoint, with a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=letters[0])
    fast.save_pretrained(folder)


def facts(device: torch.device) -> dict[str, Any]:
    """The machine, how fast its memory is, and what a launch takes."""
    number = torch.zeros(1, device=device)
    launch = min(timeit.repeat(lambda: number.add_(1), number=500)) / 500
    speed = bandwidth(device, 2**30 if device.type == "cuda" else 2**20)
    found: dict[str, Any] = {"environment": environment(device), "bytes_per_second": speed}
    return {**found, "seconds_per_launch": launch}


def fallback(device: torch.device) -> dict[str, Any]:
    """What a model that cannot be recorded says, and the memory that its generations leave."""
    model = build(SMALL["small"], device, torch.float32)
    norm, ids = model.model.norm.forward, torch.ones(1, 20, dtype=torch.long, device=device)
    model.model.norm.forward = lambda states: norm(states) * max(1.0, -float(states.norm()))
    found: dict[str, Any] = {"reserved_bytes": []}
    for _ in range(4):
        _, stats = generate(model, ids, 24)
        found["refusal"] = stats.graph_refusal
        if device.type == "cuda":
            found["reserved_bytes"].append(torch.cuda.memory_reserved(device))
    return found


def generate(model: Any, ids: Tensor, new_tokens: int) -> tuple[float, hf_spec.SpecStats]:
    """Seconds and statistics of a generation by lookup."""
    output, seconds = timed(
        lambda: model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            spec_strategy="lookup",
            return_dict_in_generate=True,
        )
    )
    return seconds, output.spec_stats


def measure_round(model: Any, ids: Tensor, new_tokens: int) -> dict[str, Any]:
    """A first and later generations: seconds, graphs, what waits by line, and launches."""
    calls = [generate(model, ids, new_tokens) for _ in range(4)]
    seconds, rounds = [spent for spent, _ in calls], calls[-1][1].target_forwards
    with waiting() as waits:
        generate(model, ids, new_tokens)
    on_gpu = ids.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=kinds) as profile:
        spent, _ = generate(model, ids, new_tokens)
    events = profile.key_averages()
    busy = sum(e.self_device_time_total for e in events if e.device_type == DeviceType.CUDA)
    asked = [event for event in events if event.key.startswith("cuda")]
    return {
        "seconds": seconds,
        "ms_per_round": 1e3 * min(seconds[1:]) / rounds,
        "rounds": rounds,
        "captures": [stats.graph_captures for _, stats in calls],
        "replays": [stats.graph_replays for _, stats in calls],
        "refusal": calls[-1][1].graph_refusal,
        "waits_per_round": {line: count / rounds for line, count in waits.most_common(20)},
        "calls_per_round": {event.key: event.count / rounds for event in asked},
        "device_busy_share": 1e-6 * busy / spent,
    }


@contextmanager
def waiting() -> Iterator[Counter[str]]:
    """The lines that make the host wait for the GPU, and how often, once the block has ended."""
    found: Counter[str] = Counter()
    on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def rounds(device: torch.device, dtype: torch.dtype, dry: bool) -> dict[str, Any]:
    """Rounds of every model with graphs and without, and its steps beside the memory's floor."""
    found: dict[str, Any] = {}
    speed = bandwidth(device, 2**20 if dry else 2**30)
    for name, sizes in (SMALL if dry else SIZES).items():
        model = build(sizes, device, dtype)
        read = [p.nbytes for n, p in model.named_parameters() if "embed_tokens" not in n]
        here: dict[str, Any] = {"floor_ms": 1e3 * sum(read) / speed, "rounds": {}}
        for batch in (1,) if dry else (1, 16):
            ids = torch.randint(1, sizes[-1] - CIRCLE, (batch, PROMPT), device=device)
            for graphs in ("auto", "off"):
                with cuda_graphs(graphs):
                    got = measure_round(model, ids, 8 if dry else 64)
                here["rounds"][f"batch {batch}, graphs {graphs}"] = got
                print(name, batch, graphs, f"{got['ms_per_round']:.2f} ms a round")
        steps = ((1,), (1, 4), 64, 2) if dry else ((1, 16), (1, 8), 512, 20)
        found[name] = {**here, "steps": list(time_steps(model, *steps))}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; writes one part as JSON, or the folder of a model."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.rounds", description=__doc__
    )
    parser.add_argument("part", choices=("facts", "fallback", "rounds", "folder"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file, or the folder")
    parser.add_argument("--dry-run", action="store_true", help="small, on a CPU")
    options = parser.parse_args(argv)
    dry = options.dry_run
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    dtype = torch.float32 if dry else torch.bfloat16
    if options.part == "folder":
        save(build(next(iter((SMALL if dry else SIZES).values())), device, dtype), options.out)
    elif options.part == "rounds":
        write_json(options.out, rounds(device, dtype, dry))
    else:
        write_json(options.out, {"facts": facts, "fallback": fallback}[options.part](device))


if __name__ == "__main__":
    main()

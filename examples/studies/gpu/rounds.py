"""Measure round costs and host synchronization on a GPU, on models with random weights.

See `python -m examples.studies.gpu.rounds --help`; `first_light` runs all parts. The models have
the sizes of published ones and repeat a cycle of tokens, so all drafts of lookup and of a draft
model are accepted: `tau` is an upper bound, and the costs are real.
"""

from __future__ import annotations

import argparse
import timeit
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation import CompileConfig

import hf_spec
from examples.studies.kernels.tree_attention import bandwidth
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.evaluation.bench.runner import peak_bytes, reset_peak, timed
from hf_spec.methods.eagle.head import build as build_eagle
from hf_spec.methods.eagle.settings import EagleTrainSettings
from hf_spec.methods.eagle.training import new_head
from hf_spec.methods.falcon.head import FalconHead
from hf_spec.methods.falcon.settings import FalconShape
from hf_spec.training.features import Text
from hf_spec.training.responses import Response

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
# Draft models by target; the default has an eighth of the layers.
DRAFTS = {"llama-3.1-8b": "llama-3.2-1b"}
# Number of timed calls, and of warm-up calls that compile and capture.
CALLS, WARM_UPS = 3, 2
# New tokens of a call, and of slow calls: plain `generate()` and drafts that are never accepted.
NEW_TOKENS, FEW_TOKENS = 128, 32
# Number of listed kernels, longest first.
KERNELS = 12
# Length of the token cycle: longer than a draft, shorter than a prompt.
CIRCLE = 24
PROMPT = 100


def build(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model of these sizes that predicts the next token of the cycle by a wide margin."""
    shape: dict[str, Any] = dict(zip(NAMES, sizes, strict=True))
    config = LlamaConfig(**shape, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        # Scale the layers down so that they add little to the embedding.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        token = torch.arange(config.vocab_size // CIRCLE * CIRCLE, device=device)
        following = torch.where((token + 1) % CIRCLE > 0, token + 1, token + 1 - CIRCLE)
        model.lm_head.weight[following] = model.model.embed_tokens.weight[token]
    return model


def prompt(batch: int, device: torch.device) -> Tensor:
    """Return (B, PROMPT) int64 ids; each row repeats a different cycle."""
    positions = torch.arange(batch, device=device)[:, None] + torch.arange(PROMPT, device=device)
    return positions % CIRCLE + CIRCLE * torch.arange(1, batch + 1, device=device)[:, None]


def facts(device: torch.device) -> dict[str, Any]:
    """Return the environment, the memory bandwidth, and the time of a kernel launch."""
    number = torch.zeros(1, device=device)
    launch = min(timeit.repeat(lambda: number.add_(1), number=500)) / 500
    speed = bandwidth(device, 2**30 if device.type == "cuda" else 2**20)
    found: dict[str, Any] = {"environment": environment(device), "bytes_per_second": speed}
    return {**found, "seconds_per_launch": launch}


def fallback(device: torch.device) -> dict[str, Any]:
    """Return why a model cannot be captured, and the reserved memory after each call."""
    model = build(SMALL["small"], device, torch.float32)
    norm, ids = model.model.norm.forward, torch.ones(1, 20, dtype=torch.long, device=device)
    model.model.norm.forward = lambda states: norm(states) * max(1.0, -float(states.norm()))
    found: dict[str, Any] = {"reserved_bytes": []}
    for _ in range(4):
        _, stats = generate(model, ids, 24, spec_strategy="lookup")
        found["refusal"] = stats.graph_refusal if stats else None
        if device.type == "cuda":
            found["reserved_bytes"].append(torch.cuda.memory_reserved(device))
    return found


def generate(
    model: Any, ids: Tensor, new_tokens: int, **method: Any
) -> tuple[float, hf_spec.SpecStats | None]:
    """Return the seconds of a call and its statistics, None for plain `generate()`."""
    output, seconds = timed(
        lambda: model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            **{"do_sample": False, **method},
        )
    )
    return seconds, getattr(output, "spec_stats", None)


class Assistants:
    """Draft model and heads of a model, each built at its first use.

    The draft model is compiled and predicts the same cycle, so its drafts are accepted. The heads
    have random weights, so their drafts are rejected, and their rounds only show costs.
    """

    def __init__(self, name: str, model: Any, sizes: Sequence[int]):
        self._model, self._vocabulary = model, sizes[-1]
        self._draft_sizes = SIZES[DRAFTS[name]] if name in DRAFTS else cut(sizes)

    @cached_property
    def draft(self) -> Any:
        """Draft model."""
        model = build(self._draft_sizes, self._model.device, self._model.dtype)
        hf_spec.compile(model)
        return model

    @cached_property
    def falcon(self) -> Any:
        """Falcon head."""
        head = FalconHead(self._model, FalconShape(2, 1), None).to(self._model.device)
        return head.to(self._model.dtype).eval().requires_grad_(False)

    @cached_property
    def eagle(self) -> Any:
        """EAGLE-3 head with a draft vocabulary."""
        size = min(32000, self._vocabulary)
        answers = [Text(Response("", "", [1], list(range(size))))]
        settings = EagleTrainSettings(vocabulary_size=size)
        return build_eagle(new_head(self._model, answers, settings, Path("eagle")), self._model)


@dataclass(frozen=True)
class Way:
    """A way to generate.

    Attributes:
        config: strategy config or name.
        assistant: attribute name in `Assistants`; "" for no assistant.
        options: other arguments of `generate()`.
        right: True if drafts are accepted.
    """

    config: Any
    assistant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    right: bool = True


# Drafts have fixed sizes, except with the default policy and `auto`.
LOOKUP = hf_spec.LookupConfig(max_draft_tokens=5)
FIVE: dict[str, Any] = {"max_draft_tokens": 5, "length_policy": "static"}
BEAM: dict[str, Any] = {**FIVE, "tree": "dynamic", "width": 4, "max_nodes": 15}
WAYS = {
    "none, uncompiled": Way(hf_spec.NoneConfig(compile=False)),
    "none": Way("none"),
    "lookup": Way(LOOKUP),
    "draft of 5": Way(hf_spec.DraftConfig(**FIVE), "draft"),
    "draft, default": Way(hf_spec.DraftConfig(), "draft"),
    "tree": Way(hf_spec.TreeConfig(length_policy="static", max_nodes=15), "draft"),
    "auto": Way(hf_spec.AutoConfig(), "draft"),
    "lookup, top-p": Way(LOOKUP, options={"do_sample": True, "top_p": 0.95}),
    "falcon": Way(hf_spec.FalconConfig(tree="falcon-llama", compile=True), "falcon", right=False),
    "eagle": Way(hf_spec.EagleConfig(**BEAM, compile=True), "eagle", right=False),
}


def cut(sizes: Sequence[int]) -> list[int]:
    """Return the sizes with an eighth of the layers."""
    return [
        max(1, size // 8) if field == "num_hidden_layers" else size
        for field, size in zip(NAMES, sizes, strict=True)
    ]


def measure_plain(model: Any, ids: Tensor, new_tokens: int, **settings: Any) -> dict[str, Any]:
    """Return the times of plain `generate()` after warm-up calls."""
    for _ in range(WARM_UPS):
        generate(model, ids, new_tokens, **settings)
    return timings(model, ids, new_tokens, **settings)


def timings(model: Any, ids: Tensor, new_tokens: int, **settings: Any) -> dict[str, Any]:
    """Return the seconds of each call, and the milliseconds per token after the first."""
    calls = [generate(model, ids, new_tokens, **settings)[0] for _ in range(CALLS)]
    first = min(generate(model, ids, 1, **settings)[0] for _ in range(CALLS))
    per_token = [1e3 * (seconds - first) / (new_tokens - 1) for seconds in calls]
    return {
        "seconds": calls,
        "seconds_of_first": first,
        "ms_per_token": median(per_token),
        "ms_per_token_spread": [min(per_token), max(per_token)],
    }


def measure_prompts(model: Any, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return the seconds to the first token of long prompts, with plain `generate()` and `none`."""
    found = []
    for length in lengths:
        ids = torch.randint(1, CIRCLE, (1, length), device=model.device)
        ways: dict[str, dict[str, Any]] = {"plain": {}, "none": {"spec_strategy": "none"}}
        seconds = {
            way: [generate(model, ids, 1, **method)[0] for _ in range(repeats)]
            for way, method in ways.items()
        }
        found.append({"tokens": length, "seconds": seconds})
    return found


def measure_round(model: Any, ids: Tensor, new_tokens: int, **method: Any) -> dict[str, Any]:
    """Return times, CUDA graph counts, waits by line, and kernels of a way to generate."""
    reset_peak(ids.device)
    warm = [generate(model, ids, new_tokens, **method) for _ in range(WARM_UPS)]
    found = timings(model, ids, new_tokens, **method)
    with waiting() as waits:
        _, stats = generate(model, ids, new_tokens, **method)
    assert stats is not None
    rounds = stats.target_forwards
    every = [stats for _, stats in warm if stats] + [stats]
    return {
        **found,
        "seconds_of_warm_up": [seconds for seconds, _ in warm],
        "ms_per_round": found["ms_per_token"] * (new_tokens - 1) / max(1, rounds - 1),
        "rounds": rounds,
        "tau": stats.tau,
        "drafted_tokens": stats.drafted_tokens,
        "captures": [stats.graph_captures for stats in every],
        "replays": [stats.graph_replays for stats in every],
        "refusal": stats.graph_refusal,
        "waits_per_round": {line: count / rounds for line, count in waits.most_common(20)},
        "peak_bytes": peak_bytes(ids.device),
        **profiled(model, ids, FEW_TOKENS, **method),
    }


def profiled(model: Any, ids: Tensor, new_tokens: int, **method: Any) -> dict[str, Any]:
    """Return CUDA calls and the longest kernels, per round of a call that includes the prefill."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * (ids.device.type == "cuda")
    with torch.profiler.profile(activities=kinds) as profile:
        _, stats = generate(model, ids, new_tokens, **method)
    rounds, events = stats.target_forwards if stats else new_tokens, profile.key_averages()
    asked = [event for event in events if event.key.startswith("cuda")]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:KERNELS]
    busy = sum(event.self_device_time_total for event in kernels)
    return {
        "calls_per_round": {event.key: event.count / rounds for event in asked},
        "kernels_per_round": sum(event.count for event in kernels) / rounds,
        "kernel_ms_per_round": 1e-3 * busy / rounds,
        "longest_kernels_ms_per_round": {
            event.key[:80]: 1e-3 * event.self_device_time_total / rounds for event in longest
        },
    }


@contextmanager
def waiting() -> Iterator[Counter[str]]:
    """Yield a counter of lines that synchronize with the device; it is filled at the end."""
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


def rounds(
    names: Sequence[str], batches: Sequence[int], device: torch.device, wanted: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Measure the `wanted` ways (default: all), and the time to read the weights once.

    Yields all results so far after every measurement, because a part may reach its time limit.
    """
    dry = device.type == "cpu"
    speed = bandwidth(device, 2**20 if dry else 2**30)
    found: dict[str, Any] = {"date": f"{date.today()}", "environment": environment(device)}
    for name in names:
        sizes = {**SMALL, **SIZES}[name]
        model = build(sizes, device, torch.float32 if dry else torch.bfloat16)
        read = [p.nbytes for n, p in model.named_parameters() if "embed_tokens" not in n]
        report = hf_spec.compile(model)
        here: dict[str, Any] = {"floor_ms": 1e3 * sum(read) / speed, "compiled": asdict(report)}
        found[name] = here
        here["prompts"] = measure_prompts(model, (16, 32) if dry else (1024, 8192), 3)
        assistants = Assistants(name, model, sizes)
        many, few = (8, 8) if dry else (NEW_TOKENS, FEW_TOKENS)
        for batch in batches:
            ids = prompt(batch, device)
            times = here[f"batch {batch}"] = {"plain": measure_plain(model, ids, few)}
            for entry in wanted or WAYS:
                way = WAYS[entry]
                assistant = getattr(assistants, way.assistant) if way.assistant else None
                method = {"spec_strategy": way.config, "assistant": assistant, **way.options}
                times[entry] = measure_round(model, ids, many if way.right else few, **method)
                print(name, batch, entry, f"{times[entry]['ms_per_token']:.2f} ms", flush=True)
                yield found
            if not dry and batch == 1:
                # Last, because it takes a minute.
                static = {"cache_implementation": "static", "compile_config": CompileConfig()}
                times["plain, compiled"] = measure_plain(model, ids, many, **static)
                yield found
        del model, assistants


def main(argv: Sequence[str] | None = None) -> None:
    """Run one part and write it as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.rounds", description=__doc__
    )
    parser.add_argument("part", choices=("facts", "fallback", "rounds"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--dry-run", action="store_true", help="small, on a CPU")
    parser.add_argument("--model", action="append", choices=SIZES, help="of rounds; default: all")
    parser.add_argument("--batch-size", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--way", action="append", choices=WAYS, help="of rounds; default: all")
    options = parser.parse_args(argv)
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    if options.part == "rounds":
        names = list(SMALL) if options.dry_run else options.model or list(SIZES)
        batches = options.batch_size or ([1] if options.dry_run else [1, 8])
        for found in rounds(names, batches, device, options.way or ()):
            write_json(options.out, found)
    else:
        write_json(options.out, {"facts": facts, "fallback": fallback}[options.part](device))


if __name__ == "__main__":
    main()

"""Estimate times per token on an H100 from bytes and kernel launches of published models.

Run as `python -m examples.studies.gpu.estimates --out estimates.json`; no GPU is needed. Bytes come
from models of the published sizes on the meta device. Launches are counted on copies of the same
architecture with tiny layers. The time of a step is the sum of reading its bytes, its kernels, and
the host time per round. These costs are fitted to the measured rounds of models with random weights
(`rounds_h100*.json`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hf_spec
from examples.studies.gpu.tables import CURRENT, RUNS, checks, estimates, load, ways
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.engine.fast import fused_layer
from hf_spec.engine.fast.compiled_layers import BACKENDS, Backend
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from tests.fake_gpu import launches, on_gpu, pretended

# Published configs: class name, sizes in the order of NAMES, and other options.
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
Published = tuple[str, tuple[int, ...], dict[str, Any]]
OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
GEMMA = {"sliding_window": 1024, "tie_word_embeddings": True}
TIED = {"tie_word_embeddings": True}
SEPARATE = {"tie_word_embeddings": False}
MODELS: dict[str, Published] = {
    "Llama-3.1-8B": ("Llama", (4096, 14336, 32, 32, 8, 128, 128256), SEPARATE),
    "Llama-3.2-1B": ("Llama", (2048, 8192, 16, 32, 8, 64, 128256), TIED),
    "Qwen3-0.6B": ("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936), TIED),
    "Qwen3-4B": ("Qwen3", (2560, 9728, 36, 32, 8, 128, 151936), TIED),
    "Qwen3-8B": ("Qwen3", (4096, 12288, 36, 32, 8, 128, 151936), SEPARATE),
    "Gemma-3-270M": (
        "Gemma3Text",
        (640, 2048, 18, 4, 1, 256, 262144),
        {**GEMMA, "sliding_window": 512},
    ),
    "Gemma-3-4B": ("Gemma3Text", (2560, 10240, 34, 8, 4, 256, 262208), GEMMA),
    "gpt-oss-20b": ("GptOss", (2880, 2880, 24, 64, 8, 64, 201088), {**OSS, **SEPARATE}),
    "SmolLM2-135M": ("Llama", (576, 1536, 30, 9, 3, 64, 49152), TIED),
    "SmolLM2-135M, 3 layers": ("Llama", (576, 1536, 3, 9, 3, 64, 49152), TIED),
}
# Draft models by target of the table.
DRAFTS = {
    "Llama-3.1-8B": "Llama-3.2-1B",
    "Qwen3-4B": "Qwen3-0.6B",
    "Qwen3-8B": "Qwen3-0.6B",
    "Gemma-3-4B": "Gemma-3-270M",
    "gpt-oss-20b": None,
    "SmolLM2-135M": "SmolLM2-135M, 3 layers",
}
TINY = (64, 128, 0, 4, 2, 16, 128)
CONTEXTS = (1024, 8192)
# gpt-oss's experts are published in 4.25 bits per weight, everything else in 16.
BYTES, EXPERT_BYTES = 2.0, 4.25 / 8
# Time to read weights with the sizes of Llama-3.1-8B once, measured in run A.
MEASURED_FLOOR_MS = 4.99
# Accepted draft tokens per round: in the measured rows, and assumed in the estimates.
CIRCLE_TAU = 4.8
TAU = {"lookup": 1.0, "draft": 2.5}
DRAFT_LENGTH = 5


def config_of(name: str, layers: int | None = None) -> PreTrainedConfig:
    """Return the published config; with `layers`, a config of N tiny layers."""
    kind, sizes, options = MODELS[name]
    values: dict[str, Any] = dict(zip(NAMES, sizes if layers is None else TINY, strict=True))
    options = dict(options)
    if layers is not None:
        values["num_hidden_layers"] = layers
        if "num_local_experts" in options:
            options |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    ends = {"eos_token_id": None, "pad_token_id": 0}
    made: PreTrainedConfig = getattr(transformers, f"{kind}Config")(**values, **options, **ends)
    return made


def weight_bytes(name: str) -> float:
    """Return the bytes of weights that a decoding step reads, including the output head."""
    config = config_of(name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    for key, weight in model.named_parameters():
        if ".experts." in key:
            share = config.num_experts_per_tok / config.num_local_experts
            total += EXPERT_BYTES * weight.numel() * share
        elif weight is not embedding or weight is head:
            total += BYTES * weight.numel()
    return total


def kv_bytes(name: str, context: int) -> float:
    """Return the bytes of the KV cache that a step after `context` tokens reads."""
    config: Any = config_of(name)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    lengths = [
        min(context, config.sliding_window) if kind == "sliding_attention" else context
        for kind in kinds
    ]
    return 2 * BYTES * config.num_key_value_heads * config.head_dim * sum(lengths)


class Launches(TorchDispatchMode):
    """Counter of operations that launch a kernel; `number` is the count so far."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += launches(func)
        return func(*args, **(kwargs or {}))


def tiny(name: str, layers: int) -> Any:
    """Return a tiny model of the architecture in bfloat16, so that its casts are counted too."""
    torch.manual_seed(0)
    config = config_of(name, layers)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def eager_launches(model: Any) -> float:
    """Return the launches of plain `generate()` per token."""
    counts = []
    ids = torch.arange(1, 9)[None]
    for tokens in (4, 12):
        with Launches() as counted:
            model.generate(ids, max_new_tokens=tokens, do_sample=False)
        counts.append(counted.number)
    return (counts[1] - counts[0]) / 8


def captured_launches(model: Any) -> float:
    """Return the kernels of a step of the engine over one token, without fused layers."""
    tree, histogram = DraftTree.from_rows([([5], [-1])]), torch.histc
    with pytest.MonkeyPatch.context() as patch, pretended(patch) as gpu, torch.no_grad():
        # Experts are counted by a histogram of integers, which the CPU does not support.
        patch.setattr(
            torch, "histc", lambda ids, *rest, **named: histogram(ids * 1.0, *rest, **named)
        )
        target = ModelRunner(on_gpu(model), 1)
        with target.active():
            target.forward(tree, [[1, 2, 3, 5]])
            target.keep([[]])
            gpu.restart()
            target.forward(tree, [[1, 2, 3, 5, 5]])
    return gpu.launches


@contextmanager
def _fused_on_cpu() -> Iterator[list[int]]:
    """Fuse layers as for a GPU; yield a list of the kernel counts of each kind of layer."""
    from torch import _inductor
    from torch._inductor import metrics

    compile_graph, found = _inductor.compile, list[int]()

    def counted(module: Any, inputs: Any, options: Any) -> Any:
        metrics.reset()
        run = compile_graph(module, inputs, options=options)
        # Matmuls are not generated; attention has two kernels, which write and read the KV cache.
        names = [str(node.target) for node in module.graph.nodes]
        found.append(metrics.generated_kernel_count + sum("mm" in name for name in names) + 2)
        return run

    backend = Backend(fused_layer.fuse_layer, fused_layer.FusedLayer, (torch.bfloat16,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_inductor, "compile", counted)
        patch.setitem(BACKENDS, "cpu", backend)
        yield found


def fused_launches(model: Any) -> float:
    """Return the kernels of a fused layer, as counted for Inductor's CPU backend."""
    with _fused_on_cpu() as found:
        report = hf_spec.compile(model)
    assert not report.refused, report.refused
    return sum(found) / len(found)


@dataclass(frozen=True)
class Counts:
    """Operations per layer, and per token or step outside of the layers."""

    eager_layer: float
    eager_rest: float
    captured_layer: float
    captured_rest: float
    fused_layer: float

    def eager(self, layers: int) -> float:
        """Return the launches of plain `generate()` per token."""
        return self.eager_rest + layers * self.eager_layer

    def captured(self, layers: int, fused: bool) -> float:
        """Return the kernels of a captured step."""
        return self.captured_rest + layers * (self.fused_layer if fused else self.captured_layer)


@cache
def counts_of(kind: str) -> Counts:
    """Count the operations of an architecture on models of 6 and 12 tiny layers."""
    name = next(name for name, (other, *_) in MODELS.items() if other == kind)
    models = [tiny(name, layers) for layers in (6, 12)]
    eager = [eager_launches(model) for model in models]
    captured = [captured_launches(model) for model in models]
    layer = [(counts[1] - counts[0]) / 6 for counts in (eager, captured)]
    rest = [counts[0] - 6 * one for counts, one in zip((eager, captured), layer, strict=True)]
    return Counts(layer[0], rest[0], layer[1], rest[1], fused_launches(models[0]))


@dataclass(frozen=True)
class Step:
    """Bytes read, launches of plain `generate()`, and kernels of a captured step, fused or not."""

    read: float
    eager: float
    captured: float
    fused: float

    @classmethod
    def of(cls, name: str, counts: Mapping[str, Counts], context: int = 0) -> Step:
        """Return the step of a published model after `context` tokens."""
        kind, (_, _, layers, *_), _ = MODELS[name]
        one = counts[kind]
        read = weight_bytes(name) + kv_bytes(name, context)
        return cls(read, one.eager(layers), one.captured(layers, False), one.captured(layers, True))


@dataclass(frozen=True)
class Host:
    """Costs that depend on the host of a run.

    Attributes:
        launch_us: time of a launch in plain `generate()`.
        round_ms: time of a captured round without its kernels.
        lookup_ms: additional time of a round with lookup.
        draft_ms: time of a draft token without its kernels.
    """

    launch_us: float
    round_ms: float
    lookup_ms: float
    draft_ms: float


@dataclass(frozen=True)
class Machine:
    """Costs of the device, and hosts by run.

    Attributes:
        bytes_per_ms: bandwidth of reading weights.
        kernel_us: time of a captured kernel besides reading its bytes.
        profiled: profiled kernels per counted one, in fused and uncompiled layers.
    """

    bytes_per_ms: float
    kernel_us: float
    profiled: Mapping[str, float]
    hosts: Mapping[str, Host]

    def captured(self, step: Step, fused: bool) -> float:
        """Return the milliseconds of a captured step on the device."""
        return step.read / self.bytes_per_ms + 1e-3 * self.kernel_us * self.kernels(step, fused)

    def kernels(self, step: Step, fused: bool) -> float:
        """Return the kernels of a captured step."""
        if fused:
            return self.profiled["fused"] * step.fused
        return self.profiled["uncompiled"] * step.captured

    def plain(self, step: Step, run: str) -> float:
        """Return the milliseconds of a token of plain `generate()`."""
        return max(1e-3 * self.hosts[run].launch_us * step.eager, step.read / self.bytes_per_ms)

    def none(self, step: Step, run: str, fused: bool) -> float:
        """Return the milliseconds of a round without drafting."""
        return self.captured(step, fused) + self.hosts[run].round_ms

    def lookup(self, step: Step, run: str, fused: bool, tau: float) -> float:
        """Return the milliseconds per token with lookup."""
        return (self.none(step, run, fused) + self.hosts[run].lookup_ms) / (1 + tau)

    def draft(self, step: Step, draft: Step, run: str, fused: bool, tau: float) -> float:
        """Return the milliseconds per token with drafts of `DRAFT_LENGTH`."""
        token = self.captured(draft, fused) + self.hosts[run].draft_ms
        return (self.none(step, run, fused) + DRAFT_LENGTH * token) / (1 + tau)


# Names of the measured sizes here and in the records, whose heads are untied: the same bytes.
MEASURED = {"Llama-3.1-8B": "llama-3.1-8b", "SmolLM2-135M": "smollm2-135m"}
# Rows of `none` in the records: run, model, way, and True if the layers are fused.
NONE_ROWS = [
    ("A, uncompiled", "Llama-3.1-8B", "none, uncompiled", False),
    ("A, uncompiled", "SmolLM2-135M", "none", False),
    ("B, fused", "Llama-3.1-8B", "none, uncompiled", False),
    ("B, fused", "Llama-3.1-8B", "none", True),
    ("B, fused", "SmolLM2-135M", "none", True),
]


def measured(run: str, model: str, way: str) -> float:
    """Return the milliseconds per token of a recorded row."""
    found: float = ways(load(RUNS[run]), MEASURED[model])[way]["ms_per_token"]
    return found


def fitted(counts: Mapping[str, Counts]) -> Machine:
    """Return the costs that fit the measured rows by least squares."""
    steps = {name: Step.of(name, counts) for name in (*MEASURED, *map(_draft, MEASURED))}
    speed = weight_bytes("Llama-3.1-8B") / MEASURED_FLOOR_MS
    large, profiled = steps["Llama-3.1-8B"], ways(load(CURRENT), MEASURED["Llama-3.1-8B"])
    factors = {
        "fused": profiled["none"]["kernels_per_round"] / large.fused,
        "uncompiled": profiled["none, uncompiled"]["kernels_per_round"] / large.captured,
    }
    device = Machine(speed, 0.0, factors, {})
    rows, rest, runs = [], [], list(RUNS)
    for run, model, way, fused in NONE_ROWS:
        kernels = 1e-3 * device.kernels(steps[model], fused)
        rows.append([kernels, *(float(run == other) for other in runs)])
        rest.append(measured(run, model, way) - steps[model].read / speed)
    solved = torch.linalg.lstsq(torch.tensor(rows), torch.tensor(rest)[:, None]).solution
    kernel, *rounds = solved[:, 0].clamp(min=0.0).tolist()
    hosts = {}
    for run, round_ms in zip(runs, rounds, strict=True):
        machine = Machine(speed, kernel, factors, {run: Host(0.0, round_ms, 0.0, 0.0)})
        fused = run == "B, fused"
        launch, lookup, draft = [], [], []
        for model in MEASURED:
            step = steps[model]
            launch.append(1e3 * measured(run, model, "plain") / step.eager)
            bare = machine.none(step, run, fused), machine.captured(steps[_draft(model)], fused)
            lookup.append((1 + CIRCLE_TAU) * measured(run, model, "lookup") - bare[0])
            spent = (1 + CIRCLE_TAU) * measured(run, model, "draft of 5") - bare[0]
            draft.append(spent / DRAFT_LENGTH - bare[1])
        hosts[run] = Host(_mean(launch), round_ms, _mean(lookup), _mean(draft))
    return Machine(speed, kernel, factors, hosts)


def _draft(model: str) -> str:
    name = DRAFTS[model]
    assert name is not None
    return name


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def compared(machine: Machine, counts: Mapping[str, Counts]) -> list[dict[str, Any]]:
    """Return estimated and measured times of the measured rows."""
    found = []
    for run in RUNS:
        for model in MEASURED:
            step, draft = Step.of(model, counts), Step.of(_draft(model), counts)
            fused = run == "B, fused"
            rows = {
                "plain": machine.plain(step, run),
                **{
                    way: machine.none(step, run, is_fused)
                    for other, name, way, is_fused in NONE_ROWS
                    if (other, name) == (run, model)
                },
                "lookup": machine.lookup(step, run, fused, CIRCLE_TAU),
                "draft of 5": machine.draft(step, draft, run, fused, CIRCLE_TAU),
            }
            found += [
                {"run": run, "model": model, "way": way, "estimated": ms}
                | {"measured": measured(run, model, way)}
                for way, ms in rows.items()
            ]
    return found


def estimated(machine: Machine, counts: Mapping[str, Counts]) -> list[dict[str, Any]]:
    """Return the estimates per target and context, with fused layers, for both hosts."""
    found = []
    for name, drafter in DRAFTS.items():
        for context in CONTEXTS:
            step = Step.of(name, counts, context)
            draft = Step.of(drafter, counts, context) if drafter else None
            times = {
                run: {
                    "plain": machine.plain(step, run),
                    "none": machine.none(step, run, True),
                    "lookup": machine.lookup(step, run, True, TAU["lookup"]),
                    "draft": None
                    if draft is None
                    else machine.draft(step, draft, run, True, TAU["draft"]),
                }
                for run in RUNS
            }
            found.append(
                {
                    "model": name,
                    "context": context,
                    **asdict(step),
                    "kernels": machine.kernels(step, True),
                    "floor_ms": step.read / machine.bytes_per_ms,
                    "static_compiled_ms": machine.captured(step, True),
                    "ms_per_token": times,
                }
            )
    return found


def study() -> dict[str, Any]:
    """Return the record."""
    counts = {kind: counts_of(kind) for kind in {kind: 0 for kind, *_ in MODELS.values()}}
    machine = fitted(counts)
    return {
        "environment": environment(torch.device("cpu")),
        "counts": {kind: asdict(one) for kind, one in counts.items()},
        "machine": asdict(machine),
        "tau": TAU,
        "compared": compared(machine, counts),
        "estimates": estimated(machine, counts),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; write the record and print its tables."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.estimates", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(argv)
    record = study()
    write_json(options.out, record)
    print(estimates(record), checks(record), sep="\n\n")


if __name__ == "__main__":
    main()

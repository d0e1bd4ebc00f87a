"""Calls that share a model: in other threads, and from inside a generation.

Outputs are compared bit for bit with those of the same call alone. Where two calls must overlap,
their processors wait for each other, so the tests are deterministic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_spec
from tests import tiny_models
from tests.model_watch import snapshot
from tests.tiers import FEW_STRATEGIES

# Packed path, soft caps, sinks, windows, and both kinds of ALiBi: a method of Bloom's decoder and a
# function of Falcon's module.
MODELS = ("bloom", "falcon_alibi", "gemma2", "gemma3", "gpt2", "gpt_oss", "llama", "nemotron")
STRATEGIES = ("lookup", "draft", "tree", "falcon", "sdsat", "auto")
NEW_TOKENS = 12
# Timeout in seconds, so that a deadlock fails a test instead of hanging it.
PATIENCE = 60.0


class At(LogitsProcessor):
    """Processor that runs an action once, when a sequence has `length` tokens; keeps all scores.

    It reads the prefix, so the engine calls it like a user's own processor.
    """

    def __init__(self, length: int, action: Callable[[], None]):
        self.length = length
        self.action = action
        self.done = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.done and input_ids.shape[1] >= self.length:
            self.done = True
            self.action()
        return scores


def prompt_of(name: str) -> Tensor:
    return tiny_models.prompts(name, "one")["input_ids"]


def generate(
    name: str, strategy: str | None, action: Callable[[], None] | None = None, step: int = 4
) -> Tensor:
    model, prompt = tiny_models.build(name), prompt_of(name)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    if strategy is not None:
        options |= tiny_models.speculation(name, strategy)
    if action is not None:
        processor = At(prompt.shape[1] + step, action)
        options["logits_processor"] = LogitsProcessorList([processor])
    output = model.generate(prompt, **options)
    if action is not None:
        assert processor.done
    return output


def in_another_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(timeout=PATIENCE)


def served(strategy: str) -> list[str]:
    return [name for name in MODELS if tiny_models.is_served(name, strategy)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", ["same thread", "another thread"])
def test_a_forward_in_the_middle_of_a_generation_is_plain(name: str, where: str) -> None:
    """A processor that calls the same model gets bit-identical logits to a call alone."""
    model, prompt = tiny_models.build(name), prompt_of(name)
    mask = torch.ones_like(prompt)
    expected = model(prompt, attention_mask=mask).logits
    seen: list[Tensor] = []

    @torch.no_grad()
    def ask() -> None:
        seen.append(model(prompt, attention_mask=mask).logits)

    alone = generate(name, None)
    action = ask if where == "same thread" else lambda: in_another_thread(ask)
    assert torch.equal(generate(name, "lookup", action), alone)
    assert torch.equal(seen[0], expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_generation_inside_a_speculative_one(name: str) -> None:
    alone = generate(name, None)
    seen: list[Tensor] = []
    outer = generate(name, "lookup", lambda: seen.append(generate(name, None)))
    assert torch.equal(outer, alone)
    assert torch.equal(seen[0], alone)


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_speculative_generation_inside_a_speculative_one(strategy: str) -> None:
    for name in ("llama", "gpt_oss"):
        alone = generate(name, None)
        seen: list[Tensor] = []
        outer = generate(name, strategy, lambda: seen.append(generate(name, strategy)))  # noqa: B023
        assert torch.equal(outer, alone)
        assert torch.equal(seen[0], alone)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_to_begin_is_the_first_to_end(name: str) -> None:
    """In this order a model would stay changed if each call restored the state it found."""
    model, alone = tiny_models.build(name), generate(name, None)
    before = snapshot(model)
    second_runs, first_ended = threading.Event(), threading.Event()
    outputs: dict[str, Tensor] = {}

    def begin_second() -> None:
        second_runs.set()
        assert first_ended.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:

        def begin_first() -> None:
            started = pool.submit(generate, name, "lookup", begin_second)
            outputs["second"] = started  # type: ignore[assignment]
            assert second_runs.wait(PATIENCE)

        outputs["first"] = generate(name, "lookup", begin_first)
        first_ended.set()
        second: Any = outputs["second"]
        outputs["second"] = second.result(timeout=PATIENCE)
    assert torch.equal(outputs["first"], alone)
    assert torch.equal(outputs["second"], alone)
    assert snapshot(model) == before


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_mixture_of_calls_is_exact(strategy: str) -> None:
    """Two threads alternate plain and speculative calls on one model, in any order."""
    for name in served(strategy):
        model, alone = tiny_models.build(name), generate(name, None)
        # The first call with hidden states installs permanent hooks of transformers.
        assert torch.equal(generate(name, strategy), alone)
        before = snapshot(model)
        barrier = threading.Barrier(2)

        def run(calls: list[str | None], name: str = name, barrier: Any = barrier) -> list[Tensor]:
            barrier.wait(PATIENCE)
            return [generate(name, call) for call in calls]

        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(run, calls) for calls in ([strategy, None, strategy], [None, strategy])
            ]
            outputs = [output for job in jobs for output in job.result(timeout=PATIENCE)]
        assert all(torch.equal(output, alone) for output in outputs), name
        assert snapshot(model) == before


@pytest.mark.parametrize("name", ["falcon_alibi", "gpt_oss", "llama"])
def test_batches_of_two_threads_share_a_model(name: str) -> None:
    """Continuous batches run concurrently with each other and with plain calls."""
    model = tiny_models.build(name)
    prompts = [prompt_of(name)[0, :length].tolist() for length in (9, 21, 4, 30)]
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        for prompt in prompts
    ]
    expected = [row[0, len(p) :].tolist() for row, p in zip(alone, prompts, strict=True)]
    before = snapshot(model)
    barrier = threading.Barrier(2)

    def run(strategy: str) -> list[list[int]]:
        barrier.wait(PATIENCE)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "max_batch": 2}
        given = tiny_models.speculation(name, strategy)
        found = model.generate_batch(prompts, **options, **given)
        assert torch.equal(generate(name, None), generate(name, "lookup"))
        return [output.generated_tokens for output in found.values()]

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, strategy) for strategy in ("lookup", "tree")]
        for job in jobs:
            assert job.result(timeout=PATIENCE) == expected
    assert snapshot(model) == before


def test_the_config_of_a_running_model_reads_as_found() -> None:
    model = tiny_models.build("llama")
    own = model.config._attn_implementation
    seen: list[str | None] = []

    def look() -> None:
        seen.append(model.config._attn_implementation)
        in_another_thread(lambda: seen.append(model.config._attn_implementation))

    generate("llama", "lookup", look)
    assert seen == [own, own]


def test_disabling_leaves_no_class_changed() -> None:
    owner: Any = type(tiny_models.build("llama").config).__mro__
    owner = next(cls for cls in owner if "_attn_implementation" in vars(cls))
    generate("llama", "lookup")
    hf_spec.disable()
    try:
        plain = vars(owner)["_attn_implementation"]
        assert plain.fget.__module__ == owner.__module__
    finally:
        hf_spec.enable()
    generate("llama", "lookup")


def test_an_exception_in_one_thread_does_not_reach_the_other() -> None:
    name = "falcon_alibi"
    model, alone = tiny_models.build(name), generate(name, None)
    before = snapshot(model)

    class ExpectedError(Exception):
        pass

    def fail() -> None:
        raise ExpectedError

    def fail_in_another_thread() -> None:
        with pytest.raises(ExpectedError):
            in_another_thread(lambda: generate(name, "lookup", fail) and None)

    assert torch.equal(generate(name, "lookup", fail_in_another_thread), alone)
    assert snapshot(model) == before


def test_packed_weights_serve_only_who_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call during a speculative one computes its matmuls as it would alone."""
    model = _wide_model()
    prompt = torch.randint(3, 90, (1, 9))
    expected = model(prompt).logits
    seen: list[Tensor] = []

    @torch.no_grad()
    def ask() -> None:
        seen.append(model(prompt).logits)
        in_another_thread(torch.no_grad()(lambda: seen.append(model(prompt).logits)))

    processors = LogitsProcessorList([At(prompt.shape[1] + 2, ask)])
    model.generate(prompt, spec_strategy="lookup", max_new_tokens=8, logits_processor=processors)
    assert len(seen) == 2
    assert all(torch.equal(logits, expected) for logits in seen)


def _wide_model() -> PreTrainedModel:
    """Return a model that is wide enough for its weights to be packed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_models.VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()

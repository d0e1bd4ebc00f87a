"""Image-text models: the same tokens as plain `generate()`, with and without images in the prompt.

The models are tiny and random, so the tests also check that tokens vary, that the image matters and
that drafts are accepted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import transformers as T
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_spec
from hf_spec import AssistantError, SpecGenerateOutput
from hf_spec.backend.device.capture import padded_steps
from hf_spec.common.compat import CACHE_NAME
from hf_spec.engine.decode import drafter
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.evaluation.lossless.distribution import chi_square
from hf_spec.generation import own_prefill
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from tests import tiny_models
from tests.biased_rules import NoResidual
from tests.model_watch import count_forwards, snapshot
from tests.partly_right import PartlyRight
from tests.refusals import refuse
from tests.targets.image_cases import (
    FAMILIES,
    IMAGE,
    TEXT,
    WORDS,
    build,
    with_images,
    without_images,
)

KINDS = ("one", "ragged")
SHAPES = ("chain", "tree")
NEW_TOKENS = {"one": 48, "ragged": 20}
# One has sliding windows, the other shifts positions after an image.
REPRESENTATIVES = ("gemma3", "qwen3_vl")
QUICK = (*REPRESENTATIVES, "llava")


def prompt(name: str, kind: str, images: bool = True) -> dict[str, Tensor]:
    return with_images(name, kind) if images else without_images(kind)


@cache
def plain(name: str, kind: str, images: bool = True) -> Tensor:
    inputs = prompt(name, kind, images)
    return build(name).generate(**inputs, max_new_tokens=NEW_TOKENS[kind], do_sample=False)


def answers(name: str, kind: str, images: bool = True) -> list[list[int]]:
    width = prompt(name, kind, images)["input_ids"].shape[1]
    return [row[width:].tolist() for row in plain(name, kind, images)]


def speculate(
    name: str, kind: str, images: bool = True, shape: str = "tree", batching: str = "unpadded"
) -> SpecGenerateOutput:
    drafts = PartlyRight(answers(name, kind, images), branches=shape == "tree")
    output: Any = build(name).generate(
        **prompt(name, kind, images),
        max_new_tokens=NEW_TOKENS[kind],
        do_sample=False,
        custom_generate=partial(generate_with, drafts, batching=batching),
        return_dict_in_generate=True,
    )
    return output


# Plain `generate()` of these fails, too, in one release of transformers.
BROKEN = {
    "llama4": pytest.mark.skipif(
        T.__version__ == "5.24.0",
        reason="Llama4ForConditionalGeneration of 5.24.0 reads an output that it does not have",
    )
}
NAMES = [pytest.param(name, marks=BROKEN.get(name, ())) for name in FAMILIES]


@pytest.mark.by_default(kind=("ragged",), name=QUICK)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_with_images(name: str, kind: str) -> None:
    for shape in SHAPES:
        output = speculate(name, kind, shape=shape)
        assert torch.equal(output.sequences, plain(name, kind))
        assert output.spec_stats.accepted_tokens > 10
    if kind == "one":
        assert len(set(answers(name, kind)[0])) >= 20


@pytest.mark.by_default(name=QUICK)
@pytest.mark.parametrize("name", NAMES)
def test_the_image_matters(name: str) -> None:
    inputs = prompt(name, "one")
    inputs["pixel_values"] = torch.rand_like(inputs["pixel_values"])
    other = build(name).generate(**inputs, max_new_tokens=NEW_TOKENS["one"], do_sample=False)
    assert not torch.equal(other, plain(name, "one"))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_text(name: str, kind: str) -> None:
    output = speculate(name, kind, images=False)
    assert torch.equal(output.sequences, plain(name, kind, images=False))
    assert output.spec_stats.accepted_tokens > 10


@pytest.fixture
def forgotten_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every image token as one position, like text."""
    monkeypatch.setattr(own_prefill, "_offsets", lambda _, masks: [0] * len(masks))


@pytest.mark.parametrize("batching", BATCHING)
def test_positions_in_every_layout(batching: str) -> None:
    output = speculate("qwen3_vl", "ragged", batching=batching)
    assert torch.equal(output.sequences, plain("qwen3_vl", "ragged"))


@pytest.mark.usefixtures("forgotten_offset")
@pytest.mark.parametrize("batching", BATCHING)
def test_without_the_offset_the_tokens_differ(batching: str) -> None:
    output = speculate("qwen3_vl", "ragged", batching=batching)
    assert not torch.equal(output.sequences, plain("qwen3_vl", "ragged"))


def test_positions_of_steps_in_the_form_of_graphs() -> None:
    with padded_steps():
        output = speculate("qwen3_vl", "ragged")
    assert torch.equal(output.sequences, plain("qwen3_vl", "ragged"))


@cache
def text_draft(vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(1)
    config = T.LlamaConfig(**{**TEXT, "num_hidden_layers": 2, "vocab_size": vocab_size})
    return T.LlamaForCausalLM(config).eval()


@cache
def first_layers(name: str) -> PreTrainedModel:
    return hf_spec.truncated_draft(build(name), 2)


@cache
def disco_adapter(name: str) -> str:
    folder = tempfile.mkdtemp()
    tiny_models.save_disco_adapter(folder, build(name))
    return folder


@cache
def falcon_head(name: str) -> FalconHead:
    torch.manual_seed(7)
    return FalconHead(build(name), FalconShape(), None).requires_grad_(False).eval()


def speculation(name: str, strategy: str) -> dict[str, Any]:
    config, assistant = STRATEGIES[strategy]
    return {"spec_strategy": config, "assistant": assistant(name)}


WIDE = tiny_models.wide_tree()
STRATEGIES: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "lookup": ("lookup", lambda name: None),
    "text draft": ("draft", lambda name: text_draft(tiny_models.VOCAB)),
    # It has no embedding for the placeholder of an image.
    "smaller text draft": ("tree", lambda name: text_draft(IMAGE - 1)),
    "draft": ("draft", first_layers),
    "tree": ("tree", first_layers),
    "gsd": ("gsd", first_layers),
    "disco": ("disco", disco_adapter),
    "falcon": (hf_spec.FalconConfig(tree=WIDE), falcon_head),
    "sdsat": (
        hf_spec.SdsatConfig(tree=WIDE),
        lambda name: tiny_models.random_adaptive_tokens(build(name)),
    ),
    "auto": (hf_spec.AutoConfig(timings=tiny_models.TIMINGS), first_layers),
}


@pytest.mark.by_default(strategy=("smaller text draft", "falcon"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_strategies(name: str, strategy: str) -> None:
    output = build(name).generate(
        **prompt(name, "ragged"),
        max_new_tokens=NEW_TOKENS["ragged"],
        do_sample=False,
        return_dict_in_generate=True,
        **speculation(name, strategy),
    )
    assert torch.equal(output.sequences, plain(name, "ragged"))
    if strategy in {"tree", "falcon", "sdsat", "auto"}:
        assert output.spec_stats.accepted_tokens > 0


@pytest.mark.by_default(kind=("ragged",), name=QUICK)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4", "lfm2_vl", "paligemma", "qwen3_5", "qwen3_vl"]
)
def test_a_draft_model_sees_the_images(name: str, kind: str) -> None:
    """With the target as draft model, every draft is accepted; that requires the image itself."""
    config = hf_spec.DraftConfig(max_draft_tokens=4, length_policy="static")
    output = build(name).generate(
        **prompt(name, kind),
        max_new_tokens=NEW_TOKENS[kind],
        do_sample=False,
        return_dict_in_generate=True,
        spec_strategy=config,
        assistant=build(name),
    )
    assert torch.equal(output.sequences, plain(name, kind))
    stats = output.spec_stats
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_several_sequences_of_one_prompt() -> None:
    """`num_return_sequences` repeats images, also for the draft model (here the target)."""
    config = hf_spec.TreeConfig(max_draft_tokens=3, length_policy="static")
    torch.manual_seed(0)
    output = build("qwen3_vl").generate(
        **prompt("qwen3_vl", "one"),
        max_new_tokens=12,
        do_sample=True,
        temperature=1e-4,
        num_return_sequences=2,
        return_dict_in_generate=True,
        spec_strategy=config,
        assistant=build("qwen3_vl"),
    )
    expected = plain("qwen3_vl", "one")[:, : output.sequences.shape[1]]
    assert torch.equal(output.sequences, expected.expand(2, -1))
    assert output.spec_stats.accepted_tokens > 12


@pytest.mark.by_default(name=QUICK, strategy=("tree",))
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5", "llava"])
def test_the_next_turn_reuses_the_cache(name: str, strategy: str) -> None:
    """The first turn has images and text, the second only more text."""
    model, inputs = build(name), prompt(name, "one")
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}

    def two_turns(**options: Any) -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        first = model.generate(**inputs, **call, **{CACHE_NAME: cache}, **options)
        # In the second turn, the images are only in the cache. The new tokens are chosen to avoid
        # ties: in a random model, the two largest logits can be 5e-7 apart.
        whole = torch.cat([first, torch.arange(30, 35)[None]], dim=1)
        return [first, model.generate(whole, **call, **{CACHE_NAME: cache}, **options)]

    for ours, theirs in zip(two_turns(**speculation(name, strategy)), two_turns(), strict=True):
        assert torch.equal(ours, theirs)


def test_layers_that_share_keys_and_values_in_a_reused_cache() -> None:
    model, inputs = build("gemma4"), prompt("gemma4", "ragged", images=False)
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    found = []
    for options in ({}, {"spec_strategy": "lookup"}):
        cache = DynamicCache(config=model.config)
        first = model.generate(**inputs, **call, **{CACHE_NAME: cache}, **options)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 15).long()], dim=1)
        second = torch.cat([first, first[:, -6:-3]], dim=1)
        call_again = {**call, "attention_mask": mask, CACHE_NAME: cache}
        found.append(model.generate(second, **call_again, **options))
    assert torch.equal(*found)


SAMPLED, STEPS, CHOICES = "llava", 3, 4
MIXED_UP = pytest.mark.skipif(
    Version(T.__version__) < Version("5.23"),
    reason="transformers 5.17 itself mixes up images where num_return_sequences is more than 1",
)
SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 4.0,
    "top_k": CHOICES,
    # In a prompt, this token is the placeholder of an image.
    "suppress_tokens": [IMAGE],
}


def exact() -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation, from plain `generate()` on all prefixes."""
    inputs = prompt(SAMPLED, "one")
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(STEPS):
        longer = {}
        paths = torch.tensor(list(known), dtype=torch.long)
        ids = torch.cat([inputs["input_ids"].expand(len(known), -1), paths], dim=1)
        images = inputs["pixel_values"].repeat(len(known), 1, 1, 1)
        output = build(SAMPLED).generate(
            ids,
            pixel_values=images,
            max_new_tokens=1,
            output_scores=True,
            return_dict_in_generate=True,
            **SAMPLING,
        )
        for path, scores in zip(list(known), output.scores[0].double(), strict=True):
            chances, tokens = scores.softmax(dim=-1).topk(CHOICES)
            for token, chance in zip(tokens.tolist(), chances.tolist(), strict=True):
                longer[(*path, token)] = known[path] * chance
        known = longer
    return known


def p_value(calls: int) -> float:
    """Return the chi-square p-value of `calls` calls with 100 sequences each."""
    inputs = prompt(SAMPLED, "one")
    config = hf_spec.DraftConfig(max_draft_tokens=2, length_policy="static")
    torch.manual_seed(5)
    drawn: list[tuple[int, ...]] = []
    for _ in range(calls):
        output = build(SAMPLED).generate(
            **inputs,
            **SAMPLING,
            max_new_tokens=STEPS,
            num_return_sequences=100,
            spec_strategy=config,
            assistant=hf_spec.truncated_draft(build(SAMPLED), 2),
        )
        drawn += [tuple(row) for row in output[:, -STEPS:].tolist()]
    joint = exact()
    assert set(drawn) <= set(joint)
    counts = [(chance * len(drawn), drawn.count(path)) for path, chance in joint.items()]
    return chi_square(counts).p_value


@MIXED_UP
def test_sampling_keeps_the_distribution() -> None:
    assert p_value(12) > 1e-6


@MIXED_UP
def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "ResidualRejection", NoResidual)
    assert p_value(8) < 1e-9


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, inputs = build("gemma3"), prompt("gemma3", "one")

    def fail(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] > inputs["input_ids"].shape[1] + 5:
            raise RuntimeError("enough")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    before = snapshot(model)
    with pytest.raises(RuntimeError, match="enough"):
        model.generate(
            **inputs,
            max_new_tokens=20,
            spec_strategy="lookup",
            stopping_criteria=T.StoppingCriteriaList([fail]),
        )
    assert snapshot(model) == before
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=NEW_TOKENS["one"], do_sample=False),
        plain("gemma3", "one"),
    )


@pytest.mark.parametrize(
    "name", ["pixel_values_videos", "input_features", "input_values", "video_grid_thw"]
)
def test_video_and_sound_are_refused(name: str) -> None:
    given = {name: torch.zeros(1, 4)}
    refuse(
        f"{name}: spec_strategy supports prompts of text and images",
        model=build("qwen3_vl"),
        **given,
    )


def test_a_prompt_that_ends_inside_an_image() -> None:
    inputs = prompt("qwen3_vl", "one")
    end = int((inputs["input_ids"] == IMAGE).nonzero()[-1, 1]) + 1
    cut = {k: v[:, :end] for k, v in inputs.items() if v.shape[:1] == (1,) and v.ndim == 2}
    images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    model = build("qwen3_vl")
    with count_forwards(model) as forwards, pytest.raises(ValueError, match="ends inside an image"):
        model.generate(**cut, **images, max_new_tokens=4, spec_strategy="lookup")
    assert forwards == []


def test_a_draft_model_that_takes_other_images() -> None:
    refuse(
        "takes images like 'llava', but the target like 'gemma3'",
        error=AssistantError,
        model=build("gemma3"),
        spec_strategy="draft",
        assistant=build("llava"),
        **prompt("gemma3", "one"),
    )


def test_generate_batch_runs_text_alone() -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    output = build("gemma3").generate_batch(prompts, max_new_tokens=8, spec_strategy="lookup")
    for request, one in zip(output.values(), prompts, strict=True):
        alone = build("gemma3").generate(torch.tensor([one]), max_new_tokens=8, do_sample=False)
        assert request.generated_tokens == alone[0, len(one) :].tolist()
    with pytest.raises(hf_spec.UnsupportedError, match=r"PaliGemma.* separately.*use generate"):
        build("paligemma").generate_batch(prompts, max_new_tokens=8, spec_strategy="lookup")


@pytest.mark.skipif(
    Version(T.__version__) < Version("5.23"), reason="GIT is refused with older transformers"
)
def test_git_counts_padding() -> None:
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = T.GitConfig(
        vision_config={**tower, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        vocab_size=WORDS,
        **tower,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = T.GitForCausalLM(config).eval()
    ids = without_images("ragged")
    refuse("counts padding in its positions", model=model, **ids)
    one: dict[str, Any] = {"input_ids": ids["input_ids"][:1], "max_new_tokens": 8}
    assert torch.equal(
        model.generate(**one, spec_strategy="lookup"), model.generate(**one, do_sample=False)
    )


def first_forwards(models: Sequence[PreTrainedModel], **call: Any) -> int:
    with count_forwards(*models) as forwards:
        models[0].generate(**call)
    return len(forwards)


def test_the_prompt_runs_once() -> None:
    """Without drafts, there is one forward pass per token; the first one is the prefill."""
    name = "qwen3_vl"
    call = {**prompt(name, "one"), "max_new_tokens": 5, "do_sample": False}
    assert first_forwards([build(name)], **call, spec_strategy="none") == 5


def test_shapes_of_the_cases() -> None:
    """Batches have rows with two images, one image and no image."""
    for name, kind in product(REPRESENTATIVES, KINDS):
        shown = (prompt(name, kind)["input_ids"] == IMAGE).sum(dim=1)
        assert len(shown.unique()) == len(shown)

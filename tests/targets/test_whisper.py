"""Whisper: the same tokens as its `generate()` without a strategy, in all of its modes.

The models are tiny and random, so the tests also check that tokens vary, that the audio matters,
and that drafts are accepted.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EncoderDecoderCache, GenerationMixin, PreTrainedModel

import hf_spec
from hf_spec import SpecStats, collect_stats
from hf_spec.common.compat import CACHE_NAME, output_cache
from hf_spec.engine import model_call, runner
from hf_spec.engine.decode import drafter
from hf_spec.engine.models import cross_attention
from hf_spec.evaluation.lossless.distribution import chi_square
from hf_spec.generation import hook
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.feature_pairs.runner import check_packed
from tests import feature_reference, tiny_models
from tests.biased_rules import NoResidual
from tests.model_watch import count_forwards, snapshot
from tests.partly_right import PartlyRight
from tests.refusals import refuse
from tests.targets.whisper_cases import (
    EOS,
    NO_TIMESTAMPS,
    SAMPLES,
    START,
    TEXT_ALONE,
    build,
    decoder_alone,
    first_layers,
    own_encoder,
    pipeline,
    recordings,
    sound,
)

NEW_TOKENS = {1: 200, 3: 40}
SHAPES = ("chain", "tree")
STATIC = hf_spec.DraftConfig(max_draft_tokens=4, length_policy="static")


@cache
def plain(rows: int) -> Tensor:
    """Return the tokens without a strategy; they exclude the forced start tokens."""
    call = {"max_new_tokens": NEW_TOKENS[rows], **TEXT_ALONE}
    said: Tensor = build().generate(sound(rows), **call)
    return said


def speculate(rows: int, **options: Any) -> tuple[Tensor, SpecStats]:
    call = {"max_new_tokens": NEW_TOKENS[rows], **TEXT_ALONE, **options}
    with collect_stats() as found:
        said = build().generate(sound(rows), **call)
    return said, sum(found, SpecStats([]))


def partly_right(rows: int, shape: str, batching: str = "unpadded") -> dict[str, Any]:
    drafts = PartlyRight(plain(rows).tolist(), branches=shape == "tree")
    return {"custom_generate": partial(generate_with, drafts, batching=batching)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", NEW_TOKENS)
def test_chains_and_trees(rows: int, shape: str) -> None:
    said, stats = speculate(rows, **partly_right(rows, shape))
    assert torch.equal(said, plain(rows))
    assert said.shape[1] == NEW_TOKENS[rows]
    assert stats.accepted_tokens > NEW_TOKENS[rows] // 2
    assert len(set(said.flatten().tolist())) >= 20


def test_the_sound_matters() -> None:
    assert len({tuple(row) for row in plain(3).tolist()}) == 3
    assert torch.equal(plain(3)[:1], plain(1)[:, : NEW_TOKENS[3]])


@pytest.mark.parametrize("batching", ["padded", "unpadded_kv"])
def test_every_layout(batching: str) -> None:
    said, _ = speculate(3, **partly_right(3, "tree", batching))
    assert torch.equal(said, plain(3))


@contextmanager
def planted(mistake: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if mistake == "the sound of another row":
            right = cross_attention.CrossAttention.__init__

            def wrong(self: Any, model: Any, states: Tensor, *others: Any) -> None:
                right(self, model, states.roll(1, 0), *others)

            patch.setattr(cross_attention.CrossAttention, "__init__", wrong)
        elif mistake == "positions by storage":
            patch.setattr(model_call, "takes_positions", lambda model: False)
        else:
            patch.setattr(runner, "align_right", _one_position_on(runner.align_right))
        yield


def _one_position_on(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        inputs = right(*args)
        inputs.positions += 1
        return inputs

    return wrong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "mistake", ["the sound of another row", "positions by storage", "one position on"]
)
def test_mistakes_that_change_the_tokens(mistake: str, shape: str) -> None:
    with planted(mistake):
        said, _ = speculate(3, **partly_right(3, shape))
    assert not torch.equal(said, plain(3))


@cache
def disco_adapter() -> str:
    folder = tempfile.mkdtemp()
    tiny_models.save_disco_adapter(folder, build())
    return folder


STRATEGIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "lookup": ("lookup", lambda: None),
    "draft": (STATIC, decoder_alone),
    "draft, cut from the target": (STATIC, first_layers),
    "draft with an encoder of its own": (STATIC, own_encoder),
    "tree": ("tree", decoder_alone),
    "gsd": ("gsd", decoder_alone),
    "disco": ("disco", disco_adapter),
    "sdsat": (
        hf_spec.SdsatConfig(tree=tiny_models.wide_tree()),
        lambda: tiny_models.random_adaptive_tokens(build(), "embeddings"),
    ),
    "auto": (hf_spec.AutoConfig(timings=tiny_models.TIMINGS), decoder_alone),
    # It times forward passes of both models first.
    "auto, measured": ("auto", decoder_alone),
}


def speculation(strategy: str) -> dict[str, Any]:
    config, assistant = STRATEGIES[strategy]
    return {"spec_strategy": config, "assistant": assistant()}


def some(names: Iterable[str], default: Collection[str]) -> list[Any]:
    """Return parametrize cases; those not in `default` are marked slow."""
    return [pytest.param(n, marks=[] if n in default else pytest.mark.slow) for n in names]


@pytest.mark.parametrize(
    "strategy", some(STRATEGIES, ("lookup", "draft", "tree", "auto, measured"))
)
def test_strategies(strategy: str) -> None:
    said, stats = speculate(3, **speculation(strategy))
    assert torch.equal(said, plain(3))
    # Lookup drafts only if the model repeats itself.
    assert stats.accepted_tokens > 0 or strategy == "lookup"


@pytest.mark.parametrize("assistant", [build, own_encoder])
def test_a_draft_model_hears_the_sound(assistant: Callable[[], PreTrainedModel]) -> None:
    """With the target as its own draft model, every draft is accepted."""
    said, stats = speculate(3, spec_strategy=STATIC, assistant=assistant())
    assert torch.equal(said, plain(3))
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_who_shares_the_encoder() -> None:
    target, other = (model.get_encoder() for model in (build(), own_encoder()))
    for assistant in (decoder_alone(), first_layers()):
        with count_forwards(target, other) as calls:
            speculate(1, spec_strategy=STATIC, assistant=assistant, max_new_tokens=8)
        assert calls == [target]
    with count_forwards(target, other) as calls:
        speculate(1, spec_strategy=STATIC, assistant=own_encoder(), max_new_tokens=8)
    assert calls == [target, other]


@pytest.mark.parametrize("strategy", ["lookup", "draft"])
def test_timestamps(strategy: str) -> None:
    expected = build().generate(sound(2), return_timestamps=True)
    said = build().generate(sound(2), return_timestamps=True, **speculation(strategy))
    assert torch.equal(said, expected)
    assert (said > NO_TIMESTAMPS).any()


LONG: dict[str, dict[str, Any]] = {
    "by itself": {},
    "conditioned": {"condition_on_prev_tokens": True},
    "prompt": {"prompt_ids": torch.tensor([9, 8, 7])},
    "prompt everywhere": {
        "prompt_ids": torch.tensor([9, 8, 7]),
        "prompt_condition_type": "all-segments",
        "condition_on_prev_tokens": True,
    },
    # The first temperature always fails the threshold; the second draws the same tokens.
    "fallback": {
        "temperature": (0.0, 1e-5),
        "logprob_threshold": -0.01,
        "compression_ratio_threshold": 1.35,
        "no_speech_threshold": 0.6,
    },
    "segments": {"return_segments": True},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("name", some(LONG, ("conditioned", "fallback", "prompt")))
@pytest.mark.parametrize("strategy", some(["lookup", "tree"], ("lookup",)))
def test_long_form(strategy: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {**recordings(), "return_timestamps": True, "max_new_tokens": 20, **LONG[name]}
    with count_forwards(build().get_encoder()) as calls:
        expected = build().generate(**call)
    assert len(calls) >= 4
    masks: list[Tensor | None] = []

    def look(*args: Any, **prepared: Any) -> Any:
        masks.append(prepared.get("decoder_attention_mask"))
        return generate_with(*args, **prepared)

    monkeypatch.setattr(hook, "generate_with", look)
    with collect_stats() as found:
        said = build().generate(**call, **speculation(strategy))
    if isinstance(said, dict):
        said, expected = said["sequences"], expected["sequences"]
    assert torch.equal(said, expected)
    assert len(found) == len(masks) == len(calls)
    padded = any(mask is not None and not mask.all() for mask in masks)
    assert padded == ("condition_on_prev_tokens" in LONG[name])


def test_a_decoder_alone_as_target() -> None:
    """The decoder alone is a language model without audio that computes its own positions."""
    batch = {
        "input_ids": torch.tensor([[EOS, EOS, START, 5, 9], [START, 3, 8, 3, 8]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "max_new_tokens": 24,
        "do_sample": False,
        **TEXT_ALONE,
    }
    model = copy.deepcopy(decoder_alone())
    # If the encoder has fewer layers, transformers makes the cache too small.
    model.config.num_hidden_layers = model.config.decoder_layers
    expected = model.generate(**batch)
    assert torch.equal(model.generate(**batch, spec_strategy="lookup"), expected)
    assert len(expected[:, 5:].unique()) >= 5


def test_rows_that_end_early() -> None:
    early = plain(3)[:, 7:9].flatten().tolist()
    call = {"max_new_tokens": 40, "eos_token_id": early, **TEXT_ALONE}
    expected = build().generate(sound(3), **call)
    said = build().generate(sound(3), **call, **speculation("tree"))
    assert torch.equal(said, expected)
    assert said.shape[1] < 40


@pytest.mark.parametrize("timestamps", [False, True])
def test_the_pipeline(timestamps: bool) -> None:
    pipe, noise = pipeline(), np.random.default_rng(0)
    audio = [noise.standard_normal(round(length * SAMPLES)) for length in (0.7, 2.4)]
    found = []
    # With unrequested timestamps, `generate()` would repeat a segment of a random model forever.
    kept = {} if timestamps else TEXT_ALONE
    for options in ({}, speculation("draft")):
        # The pipeline uses five beams by default.
        call = {"max_new_tokens": 20, "num_beams": 1, **kept, **options}
        with collect_stats() as stats:
            short = pipe(audio[0].copy(), return_timestamps=timestamps, generate_kwargs=call)
            chunked = pipe(
                audio[1].copy(), chunk_length_s=1, stride_length_s=0, batch_size=2, **call
            )
        found.append((short, chunked))
        assert (sum(stats, SpecStats([])).accepted_tokens > 0) == bool(options)
    assert found[0] == found[1]
    assert len(set(found[0][0]["text"])) > 5


def test_a_stored_strategy() -> None:
    settings: Any = build().generation_config
    try:
        settings.spec_strategy = "lookup"
        with collect_stats() as found:
            said = build().generate(sound(1), max_new_tokens=NEW_TOKENS[1], **TEXT_ALONE)
    finally:
        settings.spec_strategy = None
    assert len(found) == 1
    assert torch.equal(said, plain(1))


def test_what_a_dictionary_holds() -> None:
    """Covers the output of the engine, and of Whisper's `generate()`, which splits it by rows."""
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": 12,
    }
    for generate in (GenerationMixin.generate, type(build()).generate):
        expected, output = (
            generate(build(), sound(2), **wanted, **options)
            for options in ({}, {"spec_strategy": "lookup"})
        )
        assert torch.equal(output.sequences, expected.sequences)
        for name in ("scores", "logits"):
            torch.testing.assert_close(output[name], expected[name], atol=1e-4, rtol=1e-4)
        cache, other = output_cache(output), output_cache(expected)
        assert type(cache) is type(other) is EncoderDecoderCache
        for part in ("self_attention_cache", "cross_attention_cache"):
            pairs = zip(getattr(cache, part).layers, getattr(other, part).layers, strict=True)
            for mine, theirs in pairs:
                torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
    output = GenerationMixin.generate(build(), sound(2), **wanted, spec_strategy="lookup")
    assert output.spec_stats.target_forwards > 0
    assert "spec_stats" not in output


def test_several_sequences_of_one_recording() -> None:
    torch.manual_seed(0)
    said, stats = speculate(
        1,
        do_sample=True,
        temperature=1e-5,
        num_return_sequences=2,
        max_new_tokens=20,
        spec_strategy=STATIC,
        assistant=own_encoder(),
    )
    assert torch.equal(said, plain(1)[:, :20].expand(2, -1))
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_the_model_is_left_as_found() -> None:
    before = [snapshot(build()), snapshot(decoder_alone())]
    speculate(1, **speculation("draft"), max_new_tokens=8)
    assert [snapshot(build()), snapshot(decoder_alone())] == before


def test_an_encoder_output_instead_of_sound() -> None:
    given = {"encoder_outputs": build().get_encoder()(sound(1)), "max_new_tokens": 12}
    generate = partial(GenerationMixin.generate, build(), **given, do_sample=False)
    assert torch.equal(generate(**speculation("draft")), generate())
    with pytest.raises(hf_spec.AssistantError, match="AutoModelForCausalLM"):
        generate(**speculation("draft with an encoder of its own"))


STEPS, CHOICES, TEMPERATURE = 2, 4, 3.0


@cache
def sharper() -> PreTrainedModel:
    """Return the target with larger logits: same ranking, different probabilities."""
    model: Any = copy.deepcopy(build())
    with torch.no_grad():
        for weight in model.model.decoder.layer_norm.parameters():
            weight.mul_(30.0)
    return model


def exact() -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation, from plain forward passes on all prefixes."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(STEPS):
        paths = torch.tensor(list(known), dtype=torch.long)
        begin = torch.tensor([START, NO_TIMESTAMPS]).expand(len(known), -1)
        with torch.no_grad():
            logits = build()(
                sound(1).expand(len(known), -1, -1),
                decoder_input_ids=torch.cat([begin, paths], dim=1),
            ).logits[:, -1]
        logits[:, TEXT_ALONE["suppress_tokens"] + [5] * (step == 0)] = -torch.inf
        chances, tokens = (logits.double() / TEMPERATURE).topk(CHOICES)
        chances = chances.softmax(dim=-1)
        known = {
            (*path, int(tokens[row, rank])): reach * float(chances[row, rank])
            for row, (path, reach) in enumerate(known.items())
            for rank in range(CHOICES)
        }
    return known


def p_value(calls: int) -> float:
    """Return the chi-square p-value of `calls` calls with 100 sequences each."""
    torch.manual_seed(5)
    config = hf_spec.DraftConfig(max_draft_tokens=2, length_policy="static")
    drawn: list[tuple[int, ...]] = []
    for _ in range(calls):
        said = build().generate(
            sound(1),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=CHOICES,
            **TEXT_ALONE,
            max_new_tokens=STEPS,
            num_return_sequences=100,
            spec_strategy=config,
            assistant=sharper(),
        )
        drawn += [tuple(row) for row in said.tolist()]
    joint = exact()
    assert set(drawn) <= set(joint)
    counts = [(chance * len(drawn), drawn.count(path)) for path, chance in joint.items()]
    return chi_square(counts).p_value


def test_sampling_keeps_the_distribution() -> None:
    assert p_value(8) > 1e-6


def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "ResidualRejection", NoResidual)
    assert p_value(8) < 1e-6


class TestRefusals:
    @pytest.mark.parametrize(
        ("match", "call"),
        [
            ("num_beams=2", {"num_beams": 2}),
            (
                "batching='unpadded_input'",
                {"spec_strategy": hf_spec.LookupConfig(batching="unpadded_input")},
            ),
        ],
    )
    def test_calls(self, match: str, call: dict[str, Any]) -> None:
        refuse(match, model=build(), input_features=sound(1), **call)

    def test_times_of_words(self) -> None:
        """Whisper's `generate()` changes the attention before the error, so use a copy."""
        model = copy.deepcopy(build())
        model.generation_config.alignment_heads = [[0, 0]]
        with pytest.raises(hf_spec.UnsupportedError, match="output_attentions=True"):
            model.generate(sound(1), return_token_timestamps=True, spec_strategy="lookup")

    def test_a_reused_cache(self) -> None:
        begin = torch.tensor([[START, NO_TIMESTAMPS]])
        cache = output_cache(build()(sound(1), decoder_input_ids=begin))
        match = f"{CACHE_NAME} of type EncoderDecoderCache"
        refuse(match, model=build(), input_features=sound(1), **{CACHE_NAME: cache})

    def test_attention_without_masks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = own_encoder()
        monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        refuse("takes no tree mask", model=model, input_features=sound(1))

    def test_a_falcon_head(self) -> None:
        with pytest.raises(hf_spec.UnsupportedError, match="takes no attention function"):
            check_packed(build())

    @pytest.mark.parametrize("strategy", ["heads", "auto"])
    def test_a_head_on_hidden_states(self, strategy: str) -> None:
        refuse(
            f"spec_strategy='{strategy}' drafts from hidden states.*use 'lookup'",
            model=build(),
            input_features=sound(1),
            spec_strategy=strategy,
            assistant=feature_reference.medusa(),
        )

    def test_prompts_one_after_the_other(self) -> None:
        with pytest.raises(hf_spec.UnsupportedError, match=r"generate_batch\(\) takes token ids"):
            build().generate_batch([[START]], spec_strategy="lookup")

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: build(width=16, bins=16), "num_mel_bins 16, and .* has 8"),
            (lambda: lone(build(width=16)), "d_model 16, and .* has 32"),
        ],
    )
    def test_draft_models_that_hear_otherwise(self, make: Any, match: str) -> None:
        refuse(
            match,
            error=hf_spec.AssistantError,
            model=build(),
            input_features=sound(1),
            spec_strategy="draft",
            assistant=make(),
        )

    def test_a_draft_model_that_hears_for_a_target_that_does_not(self) -> None:
        refuse(
            "needs the output of an encoder; LlamaForCausalLM has none",
            error=hf_spec.AssistantError,
            spec_strategy="draft",
            assistant=build(),
        )


def lone(whole: PreTrainedModel) -> PreTrainedModel:
    config = type(whole.config)(**whole.config.to_diff_dict())
    return type(decoder_alone())(config).eval()

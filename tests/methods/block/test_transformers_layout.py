"""DFlash heads of transformers, `muse_glimmer_assistant`, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import cache_utils

from hf_spec import AssistantError, BlockConfig
from hf_spec.adapters.published import PublishedHead, recognize
from hf_spec.common.compat import CACHE_NAME
from hf_spec.methods.block.layouts import build_block_head
from hf_spec.methods.block.runner import BlockRunner
from tests.feature_reference import LAYERS, check_against, published, states_of, watch_drafts
from tests.tiny_models import VOCAB, build, prompts

muse = pytest.importorskip(
    "transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant",
    reason="needs a transformers with MuseGlimmerAssistantModel",
)

MODEL = build("llama")
BLOCK, WINDOW = 5, 6
TEXT = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()
# Known tokens per round; every context is longer than the window.
ENDS = (9, 10, 14, 20)


def assistant(**config: Any) -> Any:
    """Return a random transformers model with one sliding and one full attention layer."""
    torch.manual_seed(4)
    model = muse.MuseGlimmerAssistantModel(
        muse.MuseGlimmerAssistantConfig(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            block_size=BLOCK,
            mask_token_id=VOCAB - 1,
            target_layer_ids=[index - 1 for index in LAYERS],
            **config,
        )
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False).copy_(0.25 * torch.randn_like(parameter) + ("norm" in name))
    return model.eval()


ASSISTANT = assistant()


def as_published(model: Any, **config: Any) -> PublishedHead:
    """Return the head as it would be read from its files."""
    merged = {**model.config.to_dict(), **config}
    assert recognize(merged) == "dflash"
    return published("dflash", merged, dict(model.state_dict()))


def embedded(root: int) -> Tensor:
    table: Any = MODEL.get_input_embeddings()
    return table.weight[[root, *[VOCAB - 1] * (BLOCK - 1)]].detach()[None]


@torch.no_grad()
def expected(text: list[int]) -> Tensor:
    """Return (b - 1, V) logits of transformers after a text, computed in one pass."""
    states = states_of(MODEL, text[:-1], LAYERS)[None]
    # The mask of sliding layers needs a cache, even an empty one.
    cache = cache_utils.DFlashCache(config=ASSISTANT.config)
    cache.set_previous_accepted_tokens(states.shape[1])
    outputs = ASSISTANT(embedded(text[-1]), states, **{CACHE_NAME: cache}).last_hidden_state[0, 1:]
    head: Any = MODEL.get_output_embeddings()
    return head(outputs)


@torch.no_grad()
def cached_rounds() -> list[Tensor]:
    """Return (b - 1, V) logits of every round, computed with transformers' own cache."""
    cache = cache_utils.DFlashCache(config=ASSISTANT.config)
    known, rounds = 0, []
    cache.activate_past_recording()
    head: Any = MODEL.get_output_embeddings()
    for end in ENDS:
        cache.set_previous_accepted_tokens(end - known)
        if known:
            cache.crop(-BLOCK)
        states = states_of(MODEL, TEXT[:end], LAYERS)[None, known:]
        positions = torch.arange(known, end + BLOCK)[None]
        given = {"position_ids": positions, CACHE_NAME: cache}
        outputs = ASSISTANT(embedded(TEXT[end]), states, **given)
        rounds.append(head(outputs.last_hidden_state[0, 1:]))
        known = end
    return rounds


def own_rounds(head: PublishedHead) -> list[Tensor]:
    """Return (b - 1, V) logits of every round of our runner."""
    block = build_block_head(head, MODEL)
    runner, known, rounds = BlockRunner(block, 1), 0, []
    states = states_of(MODEL, TEXT, LAYERS).split(32, dim=-1)
    with runner.active():
        for end in ENDS:
            runner.learn({0: (known, end - known)}, [part[known:end] for part in states])
            proposed, token = runner.propose({0: TEXT[end]}, BLOCK - 1), TEXT[end]
            logits = []
            for _ in range(BLOCK - 1):
                logits.append(proposed.after(torch.tensor([token]), torch.tensor([0]))[0])
                token = int(logits[-1].argmax())
            rounds.append(torch.stack(logits))
            known = end
    return rounds


@torch.no_grad()
def gap(head: PublishedHead) -> float:
    return max(
        float((own - other).abs().max() / other.abs().max())
        for own, other in zip(own_rounds(head), cached_rounds(), strict=True)
    )


def test_rounds_equal_those_of_transformers() -> None:
    """Logits agree within 1e-5, and drafted tokens are the same."""
    head = as_published(ASSISTANT)
    assert gap(head) < 1e-5
    for own, other in zip(own_rounds(head), cached_rounds(), strict=True):
        assert own.argmax(-1).tolist() == other.argmax(-1).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sliding_window": WINDOW - 1},
        {"layer_types": ["full_attention"] * 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_configs_are_noticed(wrong: dict[str, Any]) -> None:
    assert gap(as_published(ASSISTANT, **wrong)) > 1e-4


def test_missing_entries_have_the_defaults_of_transformers() -> None:
    names = ("rms_norm_eps", "sliding_window", "rope_parameters", "layer_types")
    head = build_block_head(as_published(ASSISTANT, **dict.fromkeys(names)), MODEL)
    config, default = head.rotary.config, muse.MuseGlimmerAssistantConfig()
    assert head.norm.eps == default.rms_norm_eps
    # Our windows include the token itself.
    assert config.sliding_window == default.sliding_window + 1
    assert config.layer_types == ["sliding_attention"] * 2
    theta = default.rope_parameters["rope_theta"]
    assert torch.allclose(head.rotary.inv_freq, theta ** (-torch.arange(0, 8, 2) / 8))
    assert head.shape.causal == (False, False)
    assert head.shape.hidden_layers == tuple(LAYERS)
    assert not head.shape.from_anchor


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(AssistantError, match="sliding_window=0, which must be a whole number"):
        build_block_head(as_published(ASSISTANT, sliding_window=0), MODEL)


def test_generation_drafts_as_transformers_does() -> None:
    """Drafts of a ragged batch are those of transformers; the output equals plain `generate()`."""
    inputs, limits = prompts("llama", "ragged"), {"max_new_tokens": 10, "do_sample": False}
    depth = BLOCK - 1
    with watch_drafts() as seen:
        output = MODEL.generate(
            **inputs,
            **limits,
            spec_strategy=BlockConfig(max_draft_tokens=depth, children=1),
            assistant=as_published(ASSISTANT),
        )
    assert torch.equal(output, MODEL.generate(**inputs, **limits))
    chain = [[0] * length for length in range(1, depth + 1)]

    def reference(tokens: Any, path: Any) -> Tensor:
        return expected(list(tokens))[len(path)]

    assert check_against(reference, seen, chain) > 30

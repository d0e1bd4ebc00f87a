"""EAGLE-3 files for vLLM and SGLang: drafts are the same after export; unsupported heads raise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import AssistantError, EagleConfig
from hf_spec.adapters.published import PublishedHead, known_head, write_published
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.evaluation.trace.rounds import record_rounds
from hf_spec.methods.eagle.head import EagleHead, build
from hf_spec.methods.eagle.layouts import LAYOUTS, Verifier
from hf_spec.methods.eagle.spec import EagleSpec, canonical_names, read_spec
from tests import published_heads as heads
from tests.tiny_models import build as tiny
from tests.tiny_models import prompts

TEXT: Any = tiny("llama").config
VERIFIER = Verifier("org/target", ("LlamaForCausalLM",), TEXT)
USUAL = default_aux_layers(TEXT.num_hidden_layers)
KEY = "eagle_aux_hidden_state_layer_ids"


def spec_of(
    tensors: Mapping[str, Tensor], family: str = "eagle3", **config: Any
) -> tuple[EagleSpec, dict[str, Tensor]]:
    known = canonical_names(tensors)
    layers = {KEY: list(USUAL), **heads.plain_config(), **config}
    return read_spec(PublishedHead(family, layers, known, Path(), "a head"), known, TEXT), known


def plain(**more: Any) -> tuple[EagleSpec, dict[str, Tensor]]:
    tensors = {**heads.random_tensors(heads.sizes()), "d2t": heads.offsets()}
    return spec_of(tensors, **more)


def drafts(folder: str | Path) -> list[tuple[list[int], list[int]]]:
    """Return tokens and parents of every round of a generation."""
    config = EagleConfig(width=6, max_draft_tokens=3, max_nodes=12)
    given = {"max_new_tokens": 12, "do_sample": False}
    _, rounds = record_rounds(
        tiny("llama"), prompts("llama", "ragged"), config, str(folder), **given
    )
    return [(list(one.verdict.tree.tokens), list(one.verdict.tree.parent)) for one in rounds]


def exported(source: str, engine: str, out: Path) -> Path:
    head = known_head(source)
    tensors = canonical_names(head.tensors)
    spec = read_spec(head, tensors, TEXT)
    write_published(out, *LAYOUTS[engine](spec, tensors, VERIFIER, 3), "")
    return out


def inside(head: EagleHead) -> dict[str, Tensor]:
    """Return all tensors that a head computes with."""
    vocabulary = head.head.vocabulary
    known = torch.arange(head.head.size) if vocabulary is None else vocabulary
    return {**dict(head.attention.named_parameters()), "table": head._table, "known": known}


@pytest.mark.by_default(engine=("vllm",))
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "vllm") for kind in ("eagle3", "specforge", "every token", "speculators")),
        ("peagle", "vllm"),
        *((kind, "sglang") for kind in ("eagle3", "specforge", "every token")),
    ],
)
def test_read_back_it_drafts_the_same(kind: str, engine: str, tmp_path: Path) -> None:
    source = heads.sample(kind).folder
    out = exported(source, engine, tmp_path / "out")
    before, after = known_head(source), known_head(out)
    assert after.family == before.family
    first, second = build(before, tiny("llama")), build(after, tiny("llama"))
    assert second.hidden_layers == first.hidden_layers
    # Everything is equal except the number of positions, extended so that no engine stops early.
    same = [
        replace(head.spec, what="", layer={**head.spec.layer, "max_position_embeddings": 0})
        for head in (first, second)
    ]
    assert same[0] == same[1]
    expected, found = inside(first), inside(second)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert drafts(out) == drafts(source)


def test_what_vllm_reads(tmp_path: Path) -> None:
    spec, tensors = plain(rope_theta=5e5)
    config, weights = LAYOUTS["vllm"](spec, tensors, VERIFIER, 4)
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == heads.KNOWN
    assert config[KEY] == list(USUAL)
    # If it is missing, vLLM assumes true.
    assert config["norm_before_residual"] is False
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("llama", 1)
    assert (layer["rope_theta"], layer["vocab_size"]) == (5e5, TEXT.vocab_size)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert weights.keys() == {*tensors, "t2d"}
    ids = heads.offsets() + torch.arange(heads.KNOWN)
    assert weights["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_what_sglang_reads() -> None:
    spec, tensors = plain(rope_theta=5e5)
    config, weights = LAYOUTS["sglang"](spec, tensors, VERIFIER, 4)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 1)
    assert config["tie_word_embeddings"] is False
    assert (config["draft_vocab_size"], config["rope_theta"]) == (heads.KNOWN, 5e5)
    assert "eagle_config" not in config
    assert "midlayer.self_attn.q_proj.weight" in weights
    assert not any(name.startswith("layers.") for name in weights)
    # SGLang's map of hot tokens: the index plus the offset.
    hot = weights["d2t"] + torch.arange(heads.KNOWN)
    assert weights["t2d"][hot].all()


# Shapes of the tensors for SGLang's `LlamaForCausalLMEagle3`: h = H = 32, R = 60, V = 97.
SGLANG_SHAPES = {
    "fc.weight": (32, 96),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "norm.weight": (32,),
    "lm_head.weight": (60, 32),
    "d2t": (60,),
    "t2d": (97,),
}


@pytest.mark.parametrize("kind", ["eagle3", "speculators layout"])
def test_files_for_sglang_and_back(kind: str, tmp_path: Path) -> None:
    """Names, shapes, dtypes, and drafts are right, also after conversion back to vLLM's layout."""
    source = heads.sample("eagle3").folder
    if kind == "speculators layout":
        source = str(exported(source, "vllm", tmp_path / "source"))
    out = exported(source, "sglang", tmp_path / "out")
    head = known_head(out)
    assert {name: tuple(t.shape) for name, t in head.tensors.items()} == SGLANG_SHAPES
    assert (head.tensors["d2t"].dtype, head.tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert head.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "transformer_layer_config" not in head.config
    assert drafts(out) == drafts(exported(str(out), "vllm", tmp_path / "back")) == drafts(source)


@pytest.mark.parametrize(
    ("indices", "ids"),
    [((2, 5, 8), [1, 4, 7]), ((2, 4, 6, 8), [1, 3, 5, 7]), ((2, 8, BEFORE_NORM), [1, 7, 11])],
)
def test_target_layers_as_sglang_counts_them(indices: tuple[int, ...], ids: list[int]) -> None:
    """SGLang counts layer outputs from 0 if the first id is 1; our reader does the same."""
    deep: Any = type(TEXT)(**{**TEXT.to_dict(), "num_hidden_layers": 12})
    spec, tensors = plain()
    tensors["fc.weight"] = torch.ones(heads.WIDTH, len(indices) * heads.WIDTH)
    verifier = replace(VERIFIER, text=deep)
    config, weights = LAYOUTS["sglang"](replace(spec, hidden_layers=indices), tensors, verifier, 3)
    assert config["eagle_config"][KEY] == ids
    head = PublishedHead("eagle3", config, weights, Path(), "a head")
    assert read_spec(head, canonical_names(weights), deep).hidden_layers == indices


def test_positions_reach_as_far_as_the_targets() -> None:
    """Engines stop drafting at the `max_position_embeddings` of the head, often 2048."""
    long: Any = type(TEXT)(**{**TEXT.to_dict(), "max_position_embeddings": 9000})
    verifier = replace(VERIFIER, text=long)
    for change, longest in (({}, 9000), ({"rope_scaling": {"type": "linear", "factor": 2}}, 2048)):
        config, _ = LAYOUTS["sglang"](*plain(**change), verifier, 3)
        assert config["max_position_embeddings"] == longest
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2}


def test_an_embedding_that_sglang_would_replace(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {**heads.random_tensors(heads.sizes()), "d2t": heads.offsets()}
    tensors["embed_tokens.weight"] = torch.randn(TEXT.vocab_size, heads.WIDTH)
    own = spec_of(tensors, speculators_model_type="eagle3")
    assert "embed_tokens.weight" in LAYOUTS["vllm"](*own, VERIFIER, 3)[1]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        _, weights = LAYOUTS["sglang"](*own, VERIFIER, 3)
    assert "embed_tokens.weight" not in weights
    assert "SGLang uses the target's" in caplog.text
    # Tensors that no engine reads are left out silently.
    caplog.clear()
    assert "embed_tokens.weight" not in LAYOUTS["vllm"](*spec_of(tensors), VERIFIER, 3)[1]
    assert not caplog.records


def test_norms_and_biases_are_said() -> None:
    tensors = {**heads.random_tensors(heads.sizes()), "d2t": heads.offsets()}
    attention = "layers.0.self_attn."
    for name, count in (("q", heads.HEADS), ("k", heads.KEYS), ("v", heads.KEYS)):
        tensors[f"{attention}{name}_proj.bias"] = torch.ones(count * heads.SIZE)
    tensors["input_norm.weight"] = torch.ones(3 * heads.WIDTH)
    config, weights = LAYOUTS["vllm"](*spec_of(tensors, norm_output=True), VERIFIER, 3)
    assert config["norm_before_fc"] is True
    assert config["norm_output"] is True
    assert "fc_norm" not in config
    # `attention_bias` covers all four projections, so the fourth gets a bias of zeros.
    assert config["transformer_layer_config"]["attention_bias"] is True
    assert not weights[f"{attention}o_proj.bias"].any()
    normed = {k: v for k, v in tensors.items() if not k.endswith(".bias")}
    normed |= {f"{attention}{name}_norm.weight": torch.ones(heads.SIZE) for name in "qk"}
    config, _ = LAYOUTS["vllm"](*spec_of(normed), VERIFIER, 3)
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    with pytest.raises(AssistantError, match="SGLang does not read: norms of queries and keys"):
        LAYOUTS["sglang"](*spec_of(normed), VERIFIER, 3)
    with pytest.raises(AssistantError, match="biases; vLLM may"):
        LAYOUTS["sglang"](*spec_of(tensors), VERIFIER, 3)


def test_a_head_that_shares_the_targets_output() -> None:
    tensors = heads.random_tensors(heads.sizes())
    del tensors["lm_head.weight"]
    own = spec_of(tensors)
    assert LAYOUTS["vllm"](*own, VERIFIER, 3)[0]["draft_vocab_size"] == TEXT.vocab_size
    assert LAYOUTS["sglang"](*own, VERIFIER, 3)[0]["draft_vocab_size"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm_before_residual": True}, "the normed feature as a residual"),
        (
            {"layer": {"hidden_size": heads.WIDTH, "num_hidden_layers": 2}},
            "SGLang does not read: several layers; vLLM may",
        ),
        ({"mask_token": 3}, "drafts in one pass"),
        ({"layer": {"hidden_size": 16, "num_hidden_layers": 1}}, "embedding of another width"),
        ({"hidden_layers": (3, 5, 9)}, r"counts in two ways, \[3, 5, 9\]"),
    ],
)
def test_what_sglang_has_no_network_for(change: dict[str, Any], reason: str) -> None:
    spec, tensors = plain()
    with pytest.raises(AssistantError, match=reason):
        LAYOUTS["sglang"](replace(spec, **change), tensors, VERIFIER, 3)


@pytest.mark.parametrize("engine", LAYOUTS)
def test_what_no_engine_reads(engine: str) -> None:
    spec, tensors = plain()
    with pytest.raises(AssistantError, match="a single, normed state") as refused:
        LAYOUTS[engine](replace(spec, hidden_layers=(-1,)), tensors, VERIFIER, 3)
    assert "vLLM may" not in str(refused.value)
    with pytest.raises(AssistantError, match="a bias before its layer"):
        LAYOUTS[engine](spec, {**tensors, "fc.bias": torch.ones(heads.WIDTH)}, VERIFIER, 3)
    with pytest.raises(AssistantError, match="scaled"):
        LAYOUTS[engine](replace(spec, embedding="scaled"), tensors, VERIFIER, 3)
    # Token ids outside the target's vocabulary.
    with pytest.raises(AssistantError, match="d2t leads to token"):
        LAYOUTS[engine](spec, {**tensors, "d2t": heads.offsets() + 90}, VERIFIER, 3)


def test_rows_that_pad_a_vocabulary_are_left_out() -> None:
    padded = heads.random_tensors(heads.sizes(known=TEXT.vocab_size + 3))
    config, weights = LAYOUTS["vllm"](*spec_of(padded), VERIFIER, 3)
    assert config["draft_vocab_size"] == len(weights["lm_head.weight"]) == TEXT.vocab_size

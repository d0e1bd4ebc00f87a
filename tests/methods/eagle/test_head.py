"""EAGLE heads: predictions equal plain torch for every option of their configs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import AssistantError, EagleConfig
from hf_spec.adapters.published import PublishedHead, read_published
from hf_spec.engine.forward.last_layer import BEFORE_NORM, LastLayer
from hf_spec.engine.forward.node_tokens import DeviceTokens
from hf_spec.evaluation.trace.rounds import record_rounds
from hf_spec.methods.eagle.head import EagleHead
from hf_spec.methods.eagle.head import build as build_head
from hf_spec.methods.feature_pairs.runner import Blocks, HeadRunner, PairRow, extend_rows
from tests import published_heads as heads
from tests.published_heads import VOCAB, WIDTH, Reference, Sample, sample
from tests.tiny_models import build, repetitive_prompt

TOKENS = repetitive_prompt()[0].tolist()
ATTENTION = "layers.0.self_attn."


def published(kind: str = "eagle3") -> PublishedHead:
    found = read_published(sample(kind).folder)
    assert found is not None
    return found


def changed(
    shapes: dict[str, Any] | None = None, known: int | None = heads.KNOWN, **config: Any
) -> tuple[PublishedHead, dict[str, Tensor]]:
    """Return a head in SafeAILab's layout with changed tensors or config, and its tensors."""
    tensors = heads.random_tensors({**heads.sizes(known=known or VOCAB), **(shapes or {})})
    if known is not None:
        tensors["d2t"] = heads.offsets(known)
    full = {**heads.plain_config(), **config}
    return PublishedHead("eagle3", full, tensors, Path(), "a head"), tensors


@torch.no_grad()
def states_of(name: str = "llama") -> dict[int, Tensor]:
    """Return (T - 1, H) hidden states of the text by index."""
    model = build(name)
    last = LastLayer(model)
    with last.watched():
        found = model(torch.tensor([TOKENS[:-1]]), output_hidden_states=True).hidden_states
        raw = last.take()[0]
    states = {index: state[0] for index, state in enumerate(found)}
    return {**states, -1: found[-1][0], BEFORE_NORM: raw}


@torch.no_grad()
def two_steps(head: EagleHead, name: str = "llama") -> tuple[list[int], list[Tensor]]:
    """Return the first two drafted tokens after the text, and the (R,) logits of each."""
    states = states_of(name)
    row = PairRow(0, torch.zeros(0), 0)
    extend_rows([row], [head.fuse([states[layer] for layer in head.hidden_layers])])
    tokens, found = [], []
    with HeadRunner(head, 1).active() as runner:
        output = runner.feed([row], [TOKENS])[0].flatten(0, 1)
        for _ in range(2):
            found.append(head.head.draft_logits(output)[0])
            tokens.append(int(head.head.tokens(found[-1].argmax())))
            block = Blocks(1, torch.tensor([0]), None)
            given = DeviceTokens(torch.tensor(tokens[-1:]))
            output = runner.grow([row], [block], given, output)[0].flatten(0, 1)
    return tokens, found


def plain_torch(tensors: dict[str, Tensor], table: Tensor | None = None, **flags: Any) -> Reference:
    return Reference(Sample("", tensors, **flags), build("llama"), table)


def equals_reference(head: EagleHead, reference: Reference, name: str = "llama") -> None:
    tokens, found = two_steps(head, name)
    expected = [reference.logits(TOKENS, tokens[:step]) for step in range(2)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert tokens == [int(reference.ids(one.argmax())) for one in expected]


@pytest.mark.parametrize("kind", ["eagle3", "specforge", "speculators", "eagle"])
def test_layouts(kind: str) -> None:
    equals_reference(build_head(published(kind), build("llama")), sample(kind).reference())


BIASES = {f"{ATTENTION}{n}_proj.bias": (s,) for n, s in (("q", 32), ("k", 16), ("v", 16))}
NORMS = {f"{ATTENTION}{name}_norm.weight": (8,) for name in "qk"}
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm_before_fc": ({"input_norm.weight": (3 * WIDTH,)}, {}),
    "fc_norm": ({f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}, {}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "norm_output": ({}, {"norm_output": True}),
    "rope_theta": ({}, {"rope_theta": 500000.0}),
    "rope_parameters": ({}, {"rope_parameters": {"rope_theta": 500000.0}}),
    "q and k norms": (NORMS, {}),
    "biases": ({**BIASES, f"{ATTENTION}o_proj.bias": (WIDTH,)}, {}),
    "biases but for the output": (BIASES, {}),
    "heads of another size": (heads.sizes(head_size=12), {"head_dim": 12}),
    "four layers": (heads.sizes(num_aux=4), {"target_layer_ids": [1, 0, -1, 2]}),
    "a config that lies about its layers": ({}, {"num_hidden_layers": 40}),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str) -> None:
    shapes, config = SWITCHES[name]
    head, tensors = changed(shapes, **config)
    theta = 500000.0 if "rope" in name else 10000.0
    aux = (2, 1, 0, 3) if name == "four layers" else (2, 1, 0)
    flags = {flag: True for flag in config if flag.startswith("norm_")}
    reference = plain_torch(tensors, theta=theta, aux=aux, **flags)
    model = build("llama")
    if name == "four layers":
        # The last state before the final norm, which has no index in `hidden_states`.
        reference.fuse = (
            lambda states: Reference.fuse(  # type: ignore[method-assign]
                reference, [*states[:3], states_of()[BEFORE_NORM]]
            )
        )
    equals_reference(build_head(head, model), reference)


@pytest.mark.parametrize("shapes", [{}, NORMS], ids=["Llama", "Qwen3"])
def test_a_draft_window(shapes: dict[str, Any]) -> None:
    head, tensors = changed(shapes)
    limited = build_head(replace(head, overrides=(("draft_window", 5),)), build("llama"))
    equals_reference(limited, plain_torch(tensors, window=5))
    with pytest.raises(AssertionError, match="not close"):
        equals_reference(limited, plain_torch(tensors))


def test_no_table_of_positions_and_scaling_survives() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = build_head(changed(max_position_embeddings=4)[0], build("llama"))
    equals_reference(plain, plain_torch(changed()[1]))
    scaled = build_head(changed(rope_scaling=scaling)[0], build("llama"))
    slow = plain.attention.rotary_emb.inv_freq[-1] / scaled.attention.rotary_emb.inv_freq[-1]
    assert slow == pytest.approx(8.0)


class TestVocabulary:
    def test_offsets(self) -> None:
        head = build_head(published(), build("llama"))
        ids = torch.arange(heads.KNOWN) + heads.offsets()
        assert torch.equal(head.head.tokens(torch.arange(heads.KNOWN)), ids)
        assert head.head(torch.randn(2, WIDTH)).isfinite().sum() == 2 * heads.KNOWN

    def test_all_tokens(self) -> None:
        head, tensors = changed(known=None)
        equals_reference(build_head(head, build("llama")), plain_torch(tensors))

    def test_the_targets_head(self) -> None:
        head, tensors = changed(known=None)
        weight: Any = build("llama").get_output_embeddings().weight
        del tensors["lm_head.weight"]
        found = build_head(head, build("llama"))
        tensors = {**tensors, "lm_head.weight": weight.detach()}
        equals_reference(found, plain_torch(tensors))
        assert found.head.scores.weight is weight

    @pytest.mark.parametrize(
        ("offsets", "said"),
        [
            (None, "but no tensor 'd2t'"),
            (torch.full((1,), VOCAB), "d2t is"),
            (torch.full((heads.KNOWN,), VOCAB), "leads to token"),
            (torch.full((heads.KNOWN,), -1), "leads to token"),
            (-torch.arange(heads.KNOWN), "twice"),
            (torch.zeros(heads.KNOWN), "whole numbers"),
        ],
    )
    def test_refused(self, offsets: Tensor | None, said: str, monkeypatch: Any) -> None:
        monkeypatch.setattr("hf_spec.methods.published_weights.PADDED_ROWS", 4)
        head, tensors = changed()
        del tensors["d2t"]
        if offsets is not None:
            tensors["d2t"] = offsets
        with pytest.raises(AssistantError, match=said):
            build_head(head, build("llama"))


class TestEmbedding:
    def test_of_another_width(self) -> None:
        """A head that is narrower than its target needs an embedding of its own."""
        shapes = heads.sizes(width=24)
        head, tensors = changed(shapes, head_dim=8, target_hidden_size=WIDTH)
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, 24)
        equals_reference(build_head(head, build("llama")), plain_torch(tensors))
        del tensors["embed_tokens.weight"]
        with pytest.raises(AssistantError, match="no embedding of its own"):
            build_head(head, build("llama"))

    def test_untrained_ones_are_left(self) -> None:
        """SpecForge's layout may contain an untrained table; `tie_word_embeddings` is ignored."""
        head, tensors = changed(tie_word_embeddings=True)
        expected = two_steps(build_head(head, build("llama")))[1]
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH)
        torch.testing.assert_close(two_steps(build_head(head, build("llama")))[1], expected)
        own = build_head(replace(head, overrides=(("embedding", "own"),)), build("llama"))
        equals_reference(own, plain_torch(tensors))

    def test_scaled(self) -> None:
        head, tensors = changed()
        scaled = build_head(replace(head, overrides=(("embedding", "scaled"),)), build("llama"))
        table: Any = build("llama").get_input_embeddings()
        reference = plain_torch(tensors, table.weight * WIDTH**0.5)
        equals_reference(scaled, reference)


def converted(
    shapes: dict[str, Any] | None = None, **config: Any
) -> tuple[PublishedHead, dict[str, Tensor]]:
    """Return a head as `speculators convert` writes it (with both vocabulary maps), and tensors."""
    tensors = {**heads.random_tensors(shapes or heads.sizes()), "d2t": heads.offsets()}
    stored = {**tensors, "t2d": heads.mask_of(heads.offsets())}
    return PublishedHead("eagle3", heads.converted_config(**config), stored, Path(), "it"), tensors


class TestConverted:
    """The layout of speculators, with tensors that only some versions store."""

    @pytest.mark.parametrize("before", [True, False, None])
    def test_the_residual(self, before: bool | None) -> None:
        head, tensors = converted(norm_before_residual=before)
        reference = plain_torch(tensors, norm_before_residual=bool(before))
        equals_reference(build_head(head, build("llama")), reference)

    @pytest.mark.parametrize(
        ("dropped", "added"),
        [
            (("d2t",), {}),
            (("t2d",), {}),
            ((), {"verifier_lm_head.weight": (heads.KNOWN, WIDTH)}),
            ((), {"verifier_norm.weight": (WIDTH,)}),
            ((), {"embed_tokens.weight": (VOCAB, WIDTH)}),
        ],
    )
    def test_tensors_that_some_have(
        self, dropped: tuple[str, ...], added: dict[str, tuple[int, ...]]
    ) -> None:
        head, tensors = converted()
        more = heads.random_tensors(added)
        stored = {name: t for name, t in {**head.tensors, **more}.items() if name not in dropped}
        tensors |= {name: t for name, t in more.items() if not name.startswith("verifier_")}
        built = build_head(replace(head, tensors=stored), build("llama"))
        equals_reference(built, plain_torch(tensors))

    def test_the_whole_vocabulary(self) -> None:
        head, tensors = converted(heads.sizes(known=VOCAB), draft_vocab_size=VOCAB)
        for maps in (
            {},
            {"t2d": torch.zeros(VOCAB, dtype=torch.bool)},
            {"t2d": torch.ones(VOCAB, dtype=torch.bool)},
            {"d2t": torch.zeros(VOCAB, dtype=torch.long)},
        ):
            stored = {k: t for k, t in head.tensors.items() if k not in ("d2t", "t2d")}
            plain = {k: t for k, t in tensors.items() if k != "d2t"}
            built = build_head(replace(head, tensors={**stored, **maps}), build("llama"))
            assert built.head.vocabulary is None
            equals_reference(built, plain_torch(plain))

    def test_a_mask_of_another_size_maps_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_spec.methods.published_weights.PADDED_ROWS", 4)
        head, tensors = converted()
        del tensors["d2t"]
        mask = heads.mask_of(heads.offsets()).logical_not()
        with pytest.raises(AssistantError, match=f"{heads.KNOWN} of {VOCAB} tokens, but no tensor"):
            build_head(replace(head, tensors={**tensors, "t2d": mask}), build("llama"))

    def test_of_another_width_than_the_target(self) -> None:
        head, tensors = converted(heads.sizes(width=24), target_hidden_size=WIDTH)
        with pytest.raises(AssistantError, match="no embedding of its own; use a head published"):
            build_head(head, build("llama"))
        table = {"embed_tokens.weight": torch.randn(VOCAB, 24)}
        built = build_head(replace(head, tensors={**head.tensors, **table}), build("llama"))
        equals_reference(built, plain_torch({**tensors, **table}))
        with pytest.raises(AssistantError, match="hidden size 48; this one has 32"):
            build_head(converted(target_hidden_size=48)[0], build("llama"))

    def test_without_its_output_head(self) -> None:
        head, _ = converted()
        stored = {k: t for k, t in head.tensors.items() if k != "lm_head.weight"}
        with pytest.raises(AssistantError, match=f"d2t is .*not {VOCAB} whole numbers"):
            build_head(replace(head, tensors=stored), build("llama"))

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            {"rope_parameters": {"partial_rotary_factor": 1.0}},
        ],
    )
    def test_the_rotary_parameters_of_multimodal_targets(self, rope: dict[str, Any]) -> None:
        layer = {**heads.converted_config()["transformer_layer_config"], **rope}
        head, tensors = converted(transformer_layer_config=layer)
        equals_reference(build_head(head, build("llama")), plain_torch(tensors))

    @pytest.mark.parametrize(
        ("rope", "said"),
        [
            ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5\), .* use a head"),
            ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"factor=0\.25"),
            ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type='spiral', .* default, .*yarn"),
        ],
    )
    def test_rotary_parameters_that_are_refused(self, rope: dict[str, Any], said: str) -> None:
        layer = {**heads.converted_config()["transformer_layer_config"], **rope}
        with pytest.raises(AssistantError, match=said):
            build_head(converted(transformer_layer_config=layer)[0], build("llama"))

    def test_eagle_1(self) -> None:
        """The decoder layer and the first linear layer have other names."""
        names = {"layers.0.": "transformer.", "fc.": "fusion_fc."}
        tensors = dict(sample("eagle").tensors)
        for part, name in names.items():
            tensors = {key.replace(part, name): t for key, t in tensors.items()}
        assert "fusion_fc.weight" in tensors
        config = {**heads.converted_config(), "speculators_model_type": "eagle"}
        head = PublishedHead("eagle", config, tensors, Path(), "it")
        equals_reference(build_head(head, build("llama")), sample("eagle").reference())
        head = replace(head, config={**config, "layernorms": True})
        with pytest.raises(AssistantError, match=r"layernorms=True\), .* use an EAGLE-3 head"):
            build_head(head, build("llama"))

    def test_a_folder_drafts(self) -> None:
        """Drafts of a folder with the mask alone equal those of a folder with the offsets."""
        head, _ = converted()
        call = {"max_new_tokens": 12, "do_sample": False}
        expected = build("llama").generate(repetitive_prompt(), **call)
        trees = []
        for name, dropped in (("converted", ""), ("converted-mask", "d2t")):
            tensors = {key: t for key, t in head.tensors.items() if key != dropped}
            folder = heads.save(name, head.config, tensors)
            config = EagleConfig(width=4, max_draft_tokens=3, max_nodes=8)
            inputs = {"input_ids": repetitive_prompt()}
            output, rounds = record_rounds(build("llama"), inputs, config, folder, **call)
            assert torch.equal(output, expected)
            trees.append([list(one.verdict.tree.tokens) for one in rounds])
        assert trees[0] == trees[1] != []


class TestRefused:
    def test_latent_attention(self) -> None:
        tensors = {"layers.0.self_attn.kv_a_proj_with_mqa.weight": (4, 4)}
        with pytest.raises(AssistantError, match="multi-head latent attention"):
            build_head(changed(tensors)[0], build("llama"))

    def test_another_target(self) -> None:
        with pytest.raises(AssistantError, match="hidden size 64; this one has 32"):
            build_head(changed(target_hidden_size=64)[0], build("llama"))
        with pytest.raises(AssistantError, match="reads 99 numbers a token"):
            build_head(changed({"fc.weight": (WIDTH, 99)})[0], build("llama"))

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("layers.0.mlp.up_proj.weight", (7, WIDTH)),
            ("layers.0.embed_layernorm.weight", (WIDTH,)),
            ("layers.2.mlp.up_proj.weight", (48, WIDTH)),
            (f"{ATTENTION}o_proj.weight", (WIDTH,)),
            (f"{ATTENTION}k_proj.weight", (13, 2 * WIDTH)),
        ],
    )
    def test_tensors_that_do_not_fit(self, name: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(AssistantError, match="a head"):
            build_head(changed({name: shape})[0], build("llama"))

    def test_a_mask_that_is_missing(self) -> None:
        head = published("peagle")
        with pytest.raises(AssistantError, match="names no mask token"):
            build_head(replace(head, config={**head.config, "mask_token_id": None}), build("llama"))
        tensors = {key: t for key, t in head.tensors.items() if key != "mask_hidden"}
        with pytest.raises(AssistantError, match="mask_hidden is None"):
            build_head(replace(head, tensors=tensors), build("llama"))


def test_another_target_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Sizes may be equal, so only the name reveals it."""
    model = copy.copy(build("llama"))
    model.config = copy.copy(model.config)
    model.config.name_or_path = "org/own"
    build_head(published("speculators"), model)
    assert "was trained for org/other; few drafts for org/own may be accepted" in caplog.text


def test_half_precision() -> None:
    """Features overflow in float16, so a head for such a target uses bfloat16."""
    model = copy.deepcopy(build("llama")).half()
    head = build_head(published(), model)
    assert head.attention.fc.weight.dtype == torch.bfloat16
    features = head.fuse([torch.full((2, WIDTH), 6e4, dtype=torch.float16)] * 3)
    assert features.isfinite().all()
    first = build_head(published("eagle"), model)
    mixed, _ = first.mix(torch.tensor([[3, 4]]), torch.randn(1, 2, WIDTH, dtype=torch.bfloat16))
    assert mixed.dtype == torch.bfloat16
    assert first.head.draft_logits(mixed).dtype == torch.float16


def test_the_target_is_not_changed() -> None:
    model = build("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.requires_grad_(True)
    build_head(published("eagle"), model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.requires_grad for weight in model.parameters())

"""Adaptive tokens: base logits stay bit-identical; adapters fit or are rejected."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec import AssistantError, SdsatConfig, UnsupportedError
from hf_spec.adapters.folder import SpecAdapter, load_adapter, save_adapter
from hf_spec.methods.sdsat.adaptive_tokens import (
    EMBEDDINGS,
    AdaptiveShape,
    AdaptiveTokens,
    adaptive_tokens,
    from_adapter,
    merge_lora,
)
from tests.tiny_models import (
    build,
    draft_model,
    random_adaptive_tokens,
    repetitive_prompt,
    sdsat_adapter,
)

MIXED = torch.tensor([[5, 6, -1, 8, -1, -1, 9]])


class TestEmbedded:
    @pytest.mark.parametrize("name", ["llama", "gemma", "gemma3", "gpt2", "opt"])
    @torch.no_grad()
    def test_ordinary_tokens_keep_their_embeddings(self, name: str) -> None:
        model = build(name)
        tokens = from_adapter(model, sdsat_adapter(name))
        own: Any = model.get_input_embeddings()
        with tokens.active(model), tokens.embedded(model, MIXED) as found:
            virtual = MIXED[0] < 0
            assert torch.equal(found[0, ~virtual], own(MIXED[0, ~virtual]))
            assert torch.equal(found[0, virtual], tokens.embeddings.expand(3, -1))

    def test_diverse_ones_by_their_place(self) -> None:
        tokens = from_adapter(build("llama"), random_adaptive_tokens(build("llama"), diverse=True))
        assert tokens.chain(4) == [-1, -2, -3, -4]
        ids = torch.tensor([[5, -3, -1]])
        with torch.no_grad(), tokens.embedded(build("llama"), ids) as found:
            assert torch.equal(found[0, 1:], tokens.embeddings[[2, 0]])

    def test_identical_ones_are_of_any_number(self) -> None:
        tokens = from_adapter(build("llama"), sdsat_adapter("llama"))
        assert tokens.chain(40) == [-1] * 40

    @pytest.mark.parametrize("mode", ["gated", "embeddings"])
    def test_gradients_reach_what_is_trained(self, mode: str) -> None:
        model = copy.deepcopy(build("llama")).requires_grad_(False)
        tokens = from_adapter(model, random_adaptive_tokens(model, mode))
        tokens.embeddings.requires_grad_(True)
        for pair in tokens.lora.weights.values():
            for part in pair:
                part.requires_grad_(True)
        with tokens.active(model), tokens.embedded(model, MIXED) as embeddings:
            logits = model(inputs_embeds=embeddings).logits
        # Tokens before the first adaptive token do not depend on adaptive tokens.
        logits[0, :2].sum().backward(retain_graph=True)
        assert not tokens.embeddings.grad.any()  # type: ignore[union-attr]
        logits[0, 2].sum().backward()
        assert tokens.embeddings.grad.any()  # type: ignore[union-attr]
        assert all(p.grad is None for p in model.parameters())


class TestTheBaseIsUntouched:
    @pytest.mark.parametrize("mode", ["gated", "embeddings"])
    @pytest.mark.parametrize("name", ["llama", "gemma3", "bloom", "gpt2", "mixtral"])
    @torch.no_grad()
    def test_on_text(self, name: str, mode: str) -> None:
        model = build(name)
        tokens = from_adapter(model, random_adaptive_tokens(model, mode))
        ids = repetitive_prompt()
        before = model(ids).logits
        with tokens.active(model):
            assert torch.equal(model(ids).logits, before)
            mixed = torch.cat([ids, torch.tensor([[-1, -1]])], dim=1)
            with tokens.embedded(model, mixed) as embeddings:
                after = model(inputs_embeds=embeddings).logits
            # With another number of rows, a matmul may round its last bit differently.
            torch.testing.assert_close(after[:, :-2], before, atol=1e-4, rtol=1e-4)
            assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    @torch.no_grad()
    def test_ordinary_rows_do_not_depend_on_the_adapter(self, name: str) -> None:
        """With equal numbers of rows, the ordinary ones stay bit-identical for any LoRA."""
        model = build(name)
        ids = torch.cat([repetitive_prompt(), torch.tensor([[-1, -1, -1]])], dim=1)
        found = []
        for mode in ("gated", "embeddings"):
            tokens = from_adapter(model, random_adaptive_tokens(model, mode))
            with tokens.active(model), tokens.embedded(model, ids) as embeddings:
                found.append(model(inputs_embeds=embeddings).logits)
        assert torch.equal(found[0][:, :-3], found[1][:, :-3])
        assert not torch.equal(found[0][:, -3:], found[1][:, -3:])

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_whole_generations(self, name: str) -> None:
        model = build(name)
        plain = model.generate(repetitive_prompt(), max_new_tokens=20, do_sample=False)
        for fused in (False, True):
            found = model.generate(
                repetitive_prompt(),
                max_new_tokens=20,
                do_sample=False,
                spec_strategy=SdsatConfig(num_adaptive=4, fused=fused),
                assistant=sdsat_adapter(name),
            )
            assert torch.equal(found, plain)


class TestAdapters:
    @pytest.mark.parametrize("mode", ["gated", "embeddings"])
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_round_trip_on_a_fresh_base(self, tied: bool, mode: str, tmp_path: Path) -> None:
        config = copy.deepcopy(build("llama").config)
        config.tie_word_embeddings = tied
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(tmp_path / "base")
        adapter = random_adaptive_tokens(model, mode, diverse=True)
        save_adapter(tmp_path / "adapter", adapter)
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        assert fresh.config.tie_word_embeddings is tied
        found, options = adaptive_tokens(fresh, tmp_path / "adapter")
        assert options["num_adaptive"] == 3
        assert found.shape == AdaptiveShape(mode, True, 5)
        again = from_adapter(model, adapter)
        with torch.no_grad():
            logits = []
            for base, tokens in ((model, again), (fresh, found)):
                ids = torch.tensor([[5, 6, 7, -1, -2]])
                with tokens.active(base), tokens.embedded(base, ids) as embeddings:
                    logits.append(base(inputs_embeds=embeddings).logits)
        assert torch.equal(*logits)

    def test_tensors_have_the_names_of_peft(self, tmp_path: Path) -> None:
        save_adapter(tmp_path, sdsat_adapter("llama"))
        names = load_adapter(tmp_path).tensors
        assert "model.layers.0.self_attn.q_proj.lora_A.weight" in names
        assert "model.layers.0.self_attn.q_proj.lora_B.weight" in names
        assert EMBEDDINGS in names

    def test_another_base_is_refused(self) -> None:
        with pytest.raises(AssistantError, match=r"num_layers 3; .* has 2"):
            from_adapter(draft_model("llama"), sdsat_adapter("llama"))
        with pytest.raises(AssistantError, match="other weights"):
            from_adapter(build("llama", seed=1), sdsat_adapter("llama"))

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({EMBEDDINGS: None}, "embeddings is missing"),
            ({EMBEDDINGS: torch.zeros(2, 32)}, r"embeddings is \(2, 32\), not \(1, 32\)"),
            ({"model.norm.lora_A.weight": torch.zeros(2, 32)}, "lora_B.weight has no partner"),
            ({"odd": torch.zeros(1)}, "odd.* has no partner"),
            (
                {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(2, 31)},
                "up_proj has the shapes",
            ),
        ],
    )
    def test_damaged_tensors(self, tensors: dict[str, Any], message: str) -> None:
        adapter = sdsat_adapter("llama")
        changed = {n: t for n, t in {**adapter.tensors, **tensors}.items() if t is not None}
        with pytest.raises(AssistantError, match=message):
            from_adapter(build("llama"), replace(adapter, tensors=changed))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": None}, "cannot be used"),
            ({"mode": "full"}, "cannot be used"),
            ({"window": 0}, "window=0"),
            ({"diverse": "no"}, "cannot be used"),
            ({"mode": "embeddings"}, "mode 'embeddings' with a LoRA"),
        ],
    )
    def test_damaged_options(self, options: dict[str, Any], message: str) -> None:
        adapter = sdsat_adapter("llama")
        with pytest.raises(AssistantError, match=message):
            from_adapter(build("llama"), replace(adapter, options={**adapter.options, **options}))
        with pytest.raises(AssistantError, match="lack 'mode'"):
            from_adapter(build("llama"), replace(adapter, options={}))

    def test_an_adapter_of_another_method(self, tmp_path: Path) -> None:
        save_adapter(tmp_path, SpecAdapter("draft", sdsat_adapter("llama").base, {}, {}))
        with pytest.raises(AssistantError, match="'draft', not 'sdsat'"):
            adaptive_tokens(build("llama"), tmp_path)

    def test_half_precision(self) -> None:
        model = copy.deepcopy(build("llama")).to(torch.bfloat16)
        tokens = from_adapter(model, random_adaptive_tokens(model))
        assert tokens.embeddings.dtype == torch.bfloat16
        found = model.generate(
            repetitive_prompt(),
            max_new_tokens=4,
            spec_strategy="sdsat",
            assistant=random_adaptive_tokens(model),
        )
        assert found.shape[1] == repetitive_prompt().shape[1] + 4


class TestMergedLora:
    """Mode "lora" changes the model: it must be merged first; then the output is exact."""

    def test_it_is_refused_until_it_is_merged(self, tmp_path: Path) -> None:
        model = copy.deepcopy(build("llama"))
        adapter = random_adaptive_tokens(model, "lora")
        save_adapter(tmp_path, adapter)
        prompt: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
        use = {"spec_strategy": SdsatConfig(tree="sdsat-5"), "assistant": tmp_path}
        with pytest.raises(AssistantError, match="merge it first"):
            model.generate(repetitive_prompt(), **prompt, **use)
        base = model.generate(repetitive_prompt(), **prompt)
        assert merge_lora(model, tmp_path) is model
        plain = model.generate(repetitive_prompt(), **prompt)
        assert not torch.equal(plain, base)
        assert torch.equal(model.generate(repetitive_prompt(), **prompt, **use), plain)
        with pytest.raises(AssistantError, match="already"):
            merge_lora(model, adapter)

    def test_a_merged_model_can_be_saved(self, tmp_path: Path) -> None:
        model = copy.deepcopy(build("llama"))
        adapter = random_adaptive_tokens(model, "lora")
        merge_lora(model, adapter).save_pretrained(tmp_path)
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert not from_adapter(fresh, adapter).lora.weights

    def test_the_others_have_nothing_to_merge(self) -> None:
        with pytest.raises(AssistantError, match="mode 'gated' has nothing to merge"):
            merge_lora(copy.deepcopy(build("llama")), sdsat_adapter("llama"))


class TestFineTunedModels:
    def tuned(self, entry: Any) -> PreTrainedModel:
        model = copy.deepcopy(build("llama"))
        model.config.sdsat = entry
        return model

    def test_the_config_says_which_rows_they_are(self) -> None:
        model = self.tuned({"token_ids": [90, 91, 92], "window": 3, "num_adaptive": 2})
        tokens, options = adaptive_tokens(model, None)
        assert options["num_adaptive"] == 2
        assert tokens.shape == AdaptiveShape("full", True, 3)
        assert torch.equal(tokens.embeddings, model.get_input_embeddings().weight[90:93])
        for fused in (False, True):
            plain = model.generate(repetitive_prompt(), max_new_tokens=9, do_sample=False)
            config = SdsatConfig(fused=fused)
            found = model.generate(
                repetitive_prompt(), max_new_tokens=9, do_sample=False, spec_strategy=config
            )
            assert torch.equal(found, plain)

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            (None, "whose config has 'sdsat'"),
            ({"window": 3}, "incomplete.*token_ids"),
            ({"token_ids": "x", "window": 3}, "incomplete"),
            ({"token_ids": [], "window": 3}, r"names the tokens \[\]"),
            ({"token_ids": [97], "window": 3}, r"names the tokens \[97\]; the model has 97"),
        ],
    )
    def test_a_config_that_does_not(self, entry: Any, message: str) -> None:
        with pytest.raises(AssistantError, match=message):
            adaptive_tokens(self.tuned(entry), None)


def test_a_model_that_reads_more_than_embeddings_is_refused() -> None:
    model = copy.deepcopy(build("llama"))
    model.config.hidden_size_per_layer_input = 8
    with pytest.raises(UnsupportedError, match="an embedding per layer and token"):
        adaptive_tokens(model, sdsat_adapter("llama"))


def test_tokens_know_no_lora_by_default() -> None:
    shape = AdaptiveShape("embeddings", False, 2)
    assert not AdaptiveTokens(shape, torch.zeros(1, 4)).lora.weights

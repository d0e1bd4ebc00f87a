"""`spec_strategy="eagle"`: options, supported assistants, and output equal to the target's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, EagleConfig, OptionError
from hf_spec.adapters.published import read_published
from hf_spec.drafting.cost_model.adaptive_length_drafter import AdaptiveLengthDrafter
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.methods.feature_pairs.drafter import PairDrafter
from hf_spec.methods.loading import resolve_published
from hf_spec.methods.registry import make_drafter
from tests.published_heads import plain_config, sample, save
from tests.tiny_models import (
    VOCAB,
    build,
    disco_adapter,
    prompts,
    ragged_batch,
    repetitive_prompt,
)

KINDS = ["eagle3", "specforge", "speculators", "eagle", "peagle"]
CHAIN = EagleConfig(tree="chain", max_draft_tokens=3)
WIDE = EagleConfig(width=20, max_draft_tokens=2, max_nodes=80)


def generate(config: Any, assistant: Any, **inputs: Any) -> Any:
    return build("llama").generate(
        **inputs, spec_strategy=config, assistant=assistant, return_dict_in_generate=True
    )


class TestOutput:
    @pytest.mark.parametrize(
        ("kind", "config"), [*((kind, WIDE) for kind in KINDS), ("peagle", CHAIN)]
    )
    def test_greedy_is_plain(self, kind: str, config: EagleConfig) -> None:
        inputs = {**prompts("llama", "ragged"), "max_new_tokens": 10, "do_sample": False}
        output = generate(config, sample(kind).folder, **inputs)
        assert torch.equal(output.sequences, build("llama").generate(**inputs))
        assert output.spec_stats.drafted_tokens > 0
        assert output.spec_stats.accepted_tokens > 0 or config is CHAIN

    @pytest.mark.parametrize("options", [{"do_sample": True}, {"repetition_penalty": 1.4}])
    def test_chains_and_processors(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        output = generate(
            CHAIN, sample("speculators").folder, **ragged_batch((6, 9)), max_new_tokens=6, **options
        )
        assert output.sequences.shape == (2, 15)
        if not options.get("do_sample"):
            plain = build("llama").generate(**ragged_batch((6, 9)), max_new_tokens=6, **options)
            assert torch.equal(output.sequences, plain)


class TestLengths:
    @pytest.mark.parametrize("policy", ["confidence", "disco"])
    def test_policies_of_chains(self, policy: str) -> None:
        """Trees with every policy are tested in tests/methods/test_contract.py."""
        adapter = disco_adapter("llama") if policy == "disco" else None
        config = EagleConfig(tree="chain", length_policy=policy, adapter=adapter)
        inputs = {"input_ids": repetitive_prompt(9), "max_new_tokens": 6, "do_sample": False}
        output = generate(config, sample("eagle3").folder, **inputs)
        assert torch.equal(output.sequences, build("llama").generate(**inputs))

    def test_a_parallel_head_goes_no_further_than_its_masks(self) -> None:
        config = EagleConfig(width=VOCAB, max_draft_tokens=2, length_policy="heuristic")
        inputs = {"input_ids": repetitive_prompt(9), "max_new_tokens": 12, "do_sample": False}
        output = generate(config, sample("peagle").folder, **inputs)
        assert torch.equal(output.sequences, build("llama").generate(**inputs))

    def test_measured_where_no_size_is_given(self) -> None:
        folder, model = sample("eagle3").folder, build("llama")
        assert isinstance(make_drafter(EagleConfig(), model, folder), AdaptiveLengthDrafter)
        drafter = make_drafter(EagleConfig(max_draft_tokens=3, max_nodes=None), model, folder)
        assert isinstance(drafter, PairDrafter)
        assert (drafter.max_depth, drafter.shape.max_nodes, drafter.shape.children) == (3, 24, 8)


class TestAssistants:
    def test_a_head_is_kept(self) -> None:
        model, folder = build("llama"), sample("eagle").folder
        resolve = lambda given, overrides=(): resolve_published(  # noqa: E731
            "eagle", given, model, ("eagle",), overrides
        )
        head = resolve(folder)
        assert resolve(folder) is head
        assert resolve(head) is head
        assert resolve(folder, (("rope_theta", 5.0),)) is not head
        files = read_published(folder)
        assert resolve(files) is resolve(files) is not head
        stamp = Path(folder, "model.safetensors").stat().st_mtime_ns + 1
        os.utime(Path(folder, "model.safetensors"), ns=(stamp, stamp))
        assert resolve(folder) is not head
        with pytest.raises(
            OptionError, match=r"rope_theta override the config .*Eagle1Head is built already"
        ):
            resolve(head, (("rope_theta", 5.0),))

    def test_a_config_that_was_mended_is_read_again(self, tmp_path: Path) -> None:
        model, folder = build("llama"), tmp_path / "head"
        shutil.copytree(sample("eagle3").folder, folder)
        theta = lambda: resolve_published(  # noqa: E731
            "eagle", folder, model, ("eagle3",)
        ).spec.rope["rope_theta"]
        assert theta() == 10000.0
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 777.0}))
        assert theta() == 777.0

    @pytest.mark.parametrize("name", ["rms_norm_eps", "max_position_embeddings", "hidden_act"])
    def test_a_config_with_a_wrong_value(self, tmp_path: Path, name: str) -> None:
        """The configs of transformers reject these values with errors of their own."""
        shutil.copytree(sample("eagle3").folder, tmp_path / "head")
        config = json.loads((tmp_path / "head" / "config.json").read_text())
        (tmp_path / "head" / "config.json").write_text(json.dumps({**config, name: None}))
        with pytest.raises(AssistantError, match=f"is damaged: .*{name}"):
            generate("eagle", str(tmp_path / "head"), input_ids=repetitive_prompt())

    def test_readings(self) -> None:
        config = EagleConfig(
            aux_layers=[3, 1, 0], rope_theta=5e5, max_draft_tokens=2, max_nodes=None
        )
        drafter = make_drafter(config, build("llama"), sample("eagle3").folder)
        assert drafter.hidden_layers == (BEFORE_NORM, 1, 0)
        assert isinstance(drafter, PairDrafter)
        head: Any = drafter.head
        assert head.spec.rope["rope_theta"] == 5e5

    def test_the_state_before_the_norm(self) -> None:
        config = EagleConfig(aux_layers=[3, 1, 0], max_draft_tokens=2, tree="chain")
        inputs = {**ragged_batch((6, 9)), "max_new_tokens": 5, "do_sample": False}
        output = generate(config, sample("eagle3").folder, **inputs)
        assert torch.equal(output.sequences, build("llama").generate(**inputs))
        assert output.spec_stats.drafted_tokens > 0

    def test_a_model_is_no_head(self) -> None:
        with pytest.raises(AssistantError, match="spec_strategy='eagle' needs"):
            generate("eagle", build("llama"), input_ids=repetitive_prompt())

    def test_other_folders(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path / "model")
        with pytest.raises(AssistantError, match=r"not a published head.*'draft' or 'tree'"):
            generate("eagle", str(tmp_path / "model"), input_ids=repetitive_prompt())
        (tmp_path / "model" / "config.json").write_text(json.dumps({"hydra_num_heads": 1}))
        for strategy in ("eagle", "draft", "auto"):
            with pytest.raises(AssistantError, match="Hydra heads cannot be used yet"):
                generate(strategy, str(tmp_path / "model"), input_ids=repetitive_prompt())

    @pytest.mark.parametrize("strategy", ["draft", "tree"])
    def test_a_head_is_no_draft_model(self, strategy: str) -> None:
        with pytest.raises(AssistantError, match="not a draft model: use spec_strategy='eagle'"):
            generate(strategy, sample("eagle3").folder, input_ids=repetitive_prompt())

    def test_damaged(self) -> None:
        tensors = {name: t for name, t in sample("eagle3").tensors.items() if "d2t" not in name}
        folder = save("damaged", plain_config(hidden_act="nonsense"), tensors)
        with pytest.raises(AssistantError, match=r"the eagle3 head .*damaged"):
            generate("eagle", folder, input_ids=repetitive_prompt())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": "chains"}, "did you mean 'chain'"),
        ({"width": 0}, "width must be"),
        ({"max_nodes": 0}, "max_nodes must be"),
        ({"embedding": "mine"}, "embedding='mine'"),
        ({"aux_layers": "2,3"}, "must be a list of indices"),
        ({"aux_layers": []}, "must be a list of indices"),
        ({"norm_output": 1}, "must be True or False"),
        ({"rope_theta": 0}, "rope_theta must be"),
        ({"sample_drafts": "yes"}, "must be True or False"),
        ({"depth": 3}, "has no option depth"),
    ],
)
def test_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        EagleConfig(**options)


def test_chains_alone_are_drawn_at_random() -> None:
    assert EagleConfig(tree="chain").draws is True
    assert EagleConfig().draws is False
    assert EagleConfig(sample_drafts=True).draws is True
    stored = EagleConfig(aux_layers=[2, 4, 5], tree="chain").to_dict()
    stored.pop("strategy")
    assert EagleConfig(**stored) == EagleConfig(aux_layers=[2, 4, 5], tree="chain")

"""Adapters through PEFT: load, select, save and remove, with the model's output unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_spec
from hf_spec import AssistantError
from hf_spec.adapters.folder import (
    CONFIG_NAME,
    LAYER_NAME,
    WEIGHTS_NAME,
    active_adapters,
    load_adapter,
    save_adapter,
)
from hf_spec.generation.peft_type import SpecPeftConfig
from tests.adapters.samples import (
    METHODS,
    PROMPT,
    drafted,
    fresh_model,
    plain,
    sample,
    save_sample,
)
from tests.model_watch import snapshot
from tests.tiny_models import build

# These methods check the version of PEFT: transformers 5.24 rejects every release up to 0.21.
needs_accepted_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"the adapter methods of transformers need PEFT {MIN_PEFT_VERSION}",
)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path: Path, method: str) -> Path:
    return save_sample(tmp_path / method, method)


def lora_model() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(fresh_model(), config).eval()


def same_files(found: Path, expected: Path) -> bool:
    a, b = load_adapter(found), load_adapter(expected)
    return (a.method, a.options, a.base) == (b.method, b.options, b.base) and (
        a.tensors.keys() == b.tensors.keys()
        and all(
            a.tensors[name].dtype == tensor.dtype and torch.equal(a.tensors[name], tensor)
            for name, tensor in b.tensors.items()
        )
    )


class TestTransformers:
    """`model.load_adapter`."""

    def test_it_is_found_without_assistant(self, folder: Path, method: str) -> None:
        model = fresh_model()
        logits = model(PROMPT).logits
        state = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
        model.load_adapter(str(folder))
        assert torch.equal(model(PROMPT).logits, logits)
        # No weights were added or replaced.
        assert state == {n: id(value) for n, value in model.state_dict(keep_vars=True).items()}
        assert all(weight.requires_grad for weight in model.parameters())
        assert torch.equal(drafted(model, method), plain(build("llama")))

    @pytest.mark.smoke
    @needs_accepted_peft
    def test_a_path(self, folder: Path, method: str) -> None:
        model = fresh_model()
        model.load_adapter(folder, adapter_name="mine")
        assert model.active_adapters() == ["mine"]
        assert torch.equal(drafted(model, method), plain(model))

    @pytest.mark.smoke
    @needs_accepted_peft
    def test_off_on_and_away(self, folder: Path, method: str) -> None:
        model = fresh_model()
        model.load_adapter(folder)
        strategy = sample(method).strategy
        model.disable_adapters()
        with pytest.raises(AssistantError, match="needs assistant="):
            model.generate(PROMPT, spec_strategy=strategy)
        model.enable_adapters()
        drafted(model, method)
        model.delete_adapter("default")
        with pytest.raises(AssistantError, match="needs assistant="):
            model.generate(PROMPT, spec_strategy=strategy)
        assert not hasattr(model, "peft_config")
        model.load_adapter(folder)
        drafted(model, method)

    @pytest.mark.smoke
    @needs_accepted_peft
    def test_what_save_pretrained_writes_is_an_adapter(self, folder: Path, tmp_path: Path) -> None:
        model = fresh_model()
        model.load_adapter(folder)
        model.save_pretrained(tmp_path / "again")
        assert same_files(tmp_path / "again", folder)

    def test_a_taken_name(self, folder: Path) -> None:
        model = fresh_model()
        model.load_adapter(folder)
        with pytest.raises(AssistantError, match="the adapter 'default' already exists"):
            model.load_adapter(folder)

    def test_training_is_elsewhere(self, folder: Path) -> None:
        with pytest.raises(AssistantError, match="hf-spec train"):
            fresh_model().load_adapter(folder, is_trainable=True)

    def test_a_lora_goes_its_old_way(self, tmp_path: Path) -> None:
        lora_model().save_pretrained(tmp_path)
        model = fresh_model()
        model.load_adapter(str(tmp_path))
        assert torch.equal(plain(model), plain(lora_model()))
        with pytest.raises(OSError, match="nowhere"):
            model.load_adapter(str(tmp_path / "nowhere"), adapter_name="other")


class TestPeftModel:
    def test_it_is_found_without_assistant(self, folder: Path, method: str) -> None:
        logits = build("llama")(PROMPT).logits
        model = PeftModel.from_pretrained(fresh_model(), str(folder))
        assert torch.equal(model(PROMPT).logits, logits)
        assert torch.equal(plain(model), plain(build("llama")))
        assert torch.equal(drafted(model, method), plain(model))

    def test_as_an_assistant(self, folder: Path, method: str) -> None:
        model = PeftModel.from_pretrained(fresh_model(), str(folder))
        assert torch.equal(drafted(build("llama"), method, assistant=model), plain(build("llama")))

    def test_what_save_pretrained_writes_is_an_adapter(self, folder: Path, tmp_path: Path) -> None:
        model = PeftModel.from_pretrained(fresh_model(), str(folder))
        model.load_adapter(str(folder), "two")
        model.save_pretrained(str(tmp_path / "again"))
        assert same_files(tmp_path / "again", folder)
        assert same_files(tmp_path / "again/two", folder)
        again = PeftModel.from_pretrained(fresh_model(), str(tmp_path), subfolder="again")
        assert active_adapters(again.get_base_model())

    def test_disabled_and_taken_off(self, folder: Path, method: str) -> None:
        base = fresh_model()
        before = [name for name, _ in base.named_modules()]
        model = PeftModel.from_pretrained(base, str(folder))
        with model.disable_adapter(), pytest.raises(AssistantError, match="needs assistant="):
            model.generate(input_ids=PROMPT, spec_strategy=sample(method).strategy)
        drafted(model, method)
        assert model.unload() is base
        assert [name for name, _ in base.named_modules()] == before
        assert not hasattr(base, "peft_config")
        assert torch.equal(plain(base), plain(build("llama")))

    def test_merging_is_taking_off(self, folder: Path) -> None:
        model = PeftModel.from_pretrained(fresh_model(), str(folder))
        assert torch.equal(plain(model.merge_and_unload()), plain(build("llama")))

    def test_training_is_elsewhere(self, folder: Path) -> None:
        base = fresh_model()
        with pytest.raises(AssistantError, match="hf-spec train"):
            PeftModel.from_pretrained(base, str(folder), is_trainable=True)
        assert not hasattr(base, LAYER_NAME)

    def test_a_config_alone_makes_no_adapter(self, folder: Path) -> None:
        config = PeftConfig.from_pretrained(str(folder))
        assert isinstance(config, SpecPeftConfig)
        assert config.method == sample(folder.name).method
        with pytest.raises(AssistantError, match="without its weights"):
            get_peft_model(fresh_model(), config)

    def test_the_model_that_the_config_names(self, tmp_path: Path) -> None:
        build("llama").save_pretrained(tmp_path / "base")
        folder = save_sample(tmp_path / "a", "falcon")
        path = folder / CONFIG_NAME
        config = {**json.loads(path.read_text()), "base_model_name_or_path": str(tmp_path / "base")}
        path.write_text(json.dumps(config))
        model = AutoPeftModelForCausalLM.from_pretrained(str(folder))
        assert torch.equal(drafted(model, "falcon"), plain(build("llama")))


class TestChoosing:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> dict[str, Path]:
        head = sample("falcon")
        tree = {**head.options, "tree": [[0]]}
        save_adapter(tmp_path / "one", hf_spec.SpecAdapter("falcon", head.base, tree, head.tensors))
        tree = {**head.options, "tree": [[0], [1], [2]]}
        save_adapter(tmp_path / "two", hf_spec.SpecAdapter("falcon", head.base, tree, head.tensors))
        return {name: tmp_path / name for name in ("one", "two")}

    def nodes(self, model: Any, **arguments: Any) -> float:
        output = model.generate(
            input_ids=PROMPT,
            max_new_tokens=6,
            spec_strategy="falcon",
            return_dict_in_generate=True,
            **arguments,
        )
        counters = output.spec_stats.counters
        # The first and the last round have no drafts.
        return counters["draft_nodes"] / (counters["rounds"] - 2)

    def test_set_adapter_of_peft(self, folders: dict[str, Path]) -> None:
        model = PeftModel.from_pretrained(fresh_model(), str(folders["one"]), adapter_name="one")
        model.load_adapter(str(folders["two"]), "two")
        assert self.nodes(model) == 1
        model.set_adapter("two")
        assert self.nodes(model) == 3
        model.delete_adapter("two")
        assert self.nodes(model) == 1

    @pytest.mark.smoke
    @needs_accepted_peft
    def test_set_adapter_of_transformers(self, folders: dict[str, Path]) -> None:
        model = fresh_model()
        model.load_adapter(folders["one"], adapter_name="one")
        model.load_adapter(folders["two"], adapter_name="two")
        assert self.nodes(model) == 3
        model.set_adapter("one")
        assert self.nodes(model) == 1
        model.set_adapter(["one", "two"])
        with pytest.raises(AssistantError, match="2 adapters of method 'falcon' are active"):
            self.nodes(model)

    def test_another_assistant(self, folders: dict[str, Path]) -> None:
        model = fresh_model()
        model.load_adapter(folders["one"])
        assert self.nodes(model, assistant=folders["two"]) == 3
        assert self.nodes(model, assistant=load_adapter(folders["two"])) == 3
        assert self.nodes(model) == 1

    @pytest.mark.smoke
    @needs_accepted_peft
    def test_one_of_each_method(self, tmp_path: Path) -> None:
        model = fresh_model()
        for method in METHODS:
            model.load_adapter(save_sample(tmp_path / method, method), adapter_name=method)
        model.set_adapter(list(METHODS))
        for method in METHODS:
            assert torch.equal(drafted(model, method), plain(build("llama")))
        for strategy in ("draft", "gsd", "lookup", "none"):
            model.generate(PROMPT, max_new_tokens=4, spec_strategy=strategy)

    def test_auto_takes_what_is_there(self, tmp_path: Path) -> None:
        from hf_spec.methods.registry import make_drafter

        model = fresh_model()
        model.load_adapter(save_sample(tmp_path / "draft", "draft"), adapter_name="draft")
        timings = {"verify": [[1, 1.0], [64, 1.1]], "draft": {"tree": [[1, 0.001]]}}
        output = model.generate(
            PROMPT,
            max_new_tokens=6,
            spec_strategy=hf_spec.AutoConfig(timings=timings),
            return_dict_in_generate=True,
        )
        assert output.spec_stats.counters["asked_tree"] > 0
        assert make_drafter(hf_spec.AutoConfig(), model, None) is not None

    def test_another_set_of_weights_under_a_name_that_is_taken(self, tmp_path: Path) -> None:
        model = PeftModel.from_pretrained(fresh_model(), str(save_sample(tmp_path / "a", "falcon")))
        model.load_adapter(str(tmp_path / "a"), "default")
        with pytest.raises(AssistantError, match="'default' is already loaded with other weights"):
            model.load_adapter(str(save_sample(tmp_path / "b", "sdsat")), "default")


class TestLora:
    """A LoRA of the user changes the model; the draft adapter must not change it further."""

    def test_beside_an_assistant(self, folder: Path, method: str) -> None:
        model = lora_model()
        expected = plain(model)
        assert not torch.equal(expected, plain(build("llama")))
        assert torch.equal(drafted(model, method, assistant=folder), expected)

    def test_under_a_peft_model(self, folder: Path, method: str) -> None:
        model = lora_model()
        expected = plain(model)
        model.get_base_model().load_adapter(folder, adapter_name="drafts")
        assert torch.equal(plain(model), expected)
        assert torch.equal(drafted(model, method), expected)

    @pytest.mark.smoke
    @needs_accepted_peft
    def test_both_through_transformers(self, folder: Path, method: str, tmp_path: Path) -> None:
        expected = plain(lora_model())
        lora_model().save_pretrained(tmp_path / "lora")
        for order in (("lora", "drafts"), ("drafts", "lora")):
            model = fresh_model()
            for name in order:
                path = tmp_path / "lora" if name == "lora" else folder
                model.load_adapter(str(path), adapter_name=name)
            model.set_adapter(["lora", "drafts"])
            assert torch.equal(plain(model), expected)
            assert torch.equal(drafted(model, method), expected)
            # Selecting a LoRA does not deactivate the draft adapter.
            model.set_adapter("lora")
            assert torch.equal(drafted(model, method), expected)

    def test_the_lora_switched_off(self, folder: Path, method: str) -> None:
        model = lora_model()
        with model.disable_adapter():
            output = drafted(model, method, assistant=folder)
        assert torch.equal(output, plain(build("llama")))


class TestRefused:
    """Rejected adapters leave the model unchanged, even if it already has an adapter."""

    @pytest.mark.parametrize("occupied", [False, True])
    @pytest.mark.parametrize("other", ["qwen2", "gpt2"])
    def test_another_base(self, folder: Path, other: str, occupied: bool, tmp_path: Path) -> None:
        model = fresh_model(other)
        if occupied:
            from hf_spec.adapters.folder import BaseModel, SpecAdapter

            mine = sample("disco")
            adapter = SpecAdapter("disco", BaseModel.of(model), mine.options, mine.tensors)
            save_adapter(tmp_path / "fits", adapter)
            model.load_adapter(tmp_path / "fits", adapter_name="fits")
        before = snapshot(model)
        for load in (model.load_adapter, lambda name: PeftModel.from_pretrained(model, name)):
            with pytest.raises(AssistantError, match="trained for"):
                load(str(folder))
        assert snapshot(model) == before

    def test_no_weights_but_a_pickle(self, folder: Path) -> None:
        (folder / WEIGHTS_NAME).unlink()
        torch.save({"w": torch.zeros(1)}, folder / "adapter_model.bin")
        model = fresh_model()
        before = snapshot(model)
        for load in (model.load_adapter, lambda name: PeftModel.from_pretrained(model, name)):
            with pytest.raises(AssistantError, match="pickle file, which is never loaded"):
                load(str(folder))
        assert snapshot(model) == before

"""Targets that accelerate dispatches or offloads: the same tokens, and hooks left unchanged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec import UnsupportedError
from hf_spec.backend.device.placement import execution_device
from tests.targets import image_cases
from tests.targets.cases import NEW_TOKENS, assistant_of, speculate
from tests.tiny_models import build, prompts, sdsat_adapter, settled_prompt, speculation

STRATEGIES = ("lookup", "draft", "tree", "gsd", "disco", "sdsat", "auto")
KINDS = ("part", "loaded", "disk", "memory")


def split(model: PreTrainedModel) -> dict[str, Any]:
    """Return a device map: the first layer in memory, the other layers and the head on disk."""
    depth = model.config.num_hidden_layers
    layers = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(depth)}
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    return {**ends, **layers, "lm_head": "disk"}


def offloaded(name: str, kind: str, folder: Path) -> PreTrainedModel:
    model: Any = copy.deepcopy(build(name))
    cpu = torch.device("cpu")
    if kind == "part":
        return dispatch_model(
            model, split(model), main_device="cpu", offload_dir=folder, force_hooks=True
        )
    if kind == "loaded":
        model.save_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", device_map=split(model), offload_folder=folder / "weights"
        ).eval()
        model.generation_config.update(pad_token_id=0, eos_token_id=None)
        return model
    if kind == "disk":
        disk_offload(model, folder, execution_device=cpu)
    else:
        cpu_offload(model, execution_device=cpu)
    return model


def hooks(model: nn.Module) -> dict[str, Any]:
    """Return accelerate's hook and `forward` of every module, and the device of every weight."""
    modules = {
        name: (id(getattr(module, "_hf_hook", None)), id(module.__dict__.get("forward")))
        for name, module in model.named_modules()
    }
    return {**modules, **{name: p.device.type for name, p in model.named_parameters()}}


@pytest.mark.by_default(strategy=("tree", "sdsat"), kind=("part", "disk"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_and_the_same_hooks(kind: str, strategy: str, tmp_path: Path) -> None:
    model = offloaded("llama", kind, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    before = hooks(model)
    found = speculate(model, "llama", strategy)
    assert hooks(model) == before
    assert (
        found["tokens"] == found["plain"] == speculate(build("llama"), "llama", "lookup")["plain"]
    )
    if strategy != "auto":
        assert found["accepted"] > 0


@pytest.mark.by_default(name=("gemma3",))
@pytest.mark.parametrize("name", ["bloom", "gemma3", "gpt_oss"])
def test_other_paths_through_the_engine(name: str, tmp_path: Path) -> None:
    """Covers the rectangular path, sliding windows and attention sinks, with left-padded rows."""
    model = offloaded(name, "disk", tmp_path)
    found = speculate(model, name, "tree", "ragged")
    assert found["tokens"] == found["plain"]


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_a_vision_tower_on_disk(name: str, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(image_cases.build(name))
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    before = hooks(model)
    images = image_cases.with_images(name, "ragged")
    call: dict[str, Any] = {**images, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = image_cases.build(name).generate(**call)
    for strategy in ("lookup", "tree"):
        assert torch.equal(model.generate(**call, **assistant_of(model, name, strategy)), expected)
    assert hooks(model) == before


def test_a_gated_lora_on_offloaded_layers(tmp_path: Path) -> None:
    model = offloaded("llama", "part", tmp_path)
    prompt = settled_prompt("llama")
    call = {**speculation("llama", "sdsat"), "assistant": sdsat_adapter("llama")}
    wanted = build("llama").generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    counts = []
    for target in (model, build("llama")):
        output = target.generate(
            prompt, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, do_sample=False, **call
        )
        assert output.sequences.tolist() == wanted.tolist()
        counts.append(output.spec_stats.accepted_tokens)
    assert counts[0] == counts[1] > 0


def test_continuous_batching(tmp_path: Path) -> None:
    model = offloaded("llama", "disk", tmp_path)
    texts = [[5, 6, 7, 5, 6], [8, 9], [5, 6, 7]]
    runs = [
        target.generate_batch(texts, max_new_tokens=8, do_sample=False, spec_strategy="lookup")
        for target in (model, build("llama"))
    ]
    tokens = [[request.generated_tokens for request in run.values()] for run in runs]
    assert tokens[0] == tokens[1]


def test_weights_of_an_assistant_of_its_own_must_be_in_memory(tmp_path: Path) -> None:
    model = offloaded("llama", "part", tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"offloaded or sharded .* load the target on one device"
    ):
        assistant_of(model, "llama", "falcon")


def test_an_exception_leaves_the_hooks(tmp_path: Path) -> None:
    model = offloaded("llama", "part", tmp_path)
    before = hooks(model)

    class Interrupt:
        def put(self, value: Any) -> None:
            if value.numel() < 5:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        model.generate(**prompts("llama", "one"), spec_strategy="lookup", streamer=Interrupt())
    assert hooks(model) == before


def test_where_offloaded_weights_are_brought(tmp_path: Path) -> None:
    model = offloaded("llama", "memory", tmp_path)
    assert model.device.type == "meta"
    assert execution_device(model.get_input_embeddings()) == torch.device("cpu")
    assert execution_device(nn.Linear(2, 2, device="meta")).type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["lookup", "tree", "gsd"])
def test_across_devices(strategy: str, tmp_path: Path) -> None:
    """The layers alternate between GPUs; with a single GPU, the last layer runs on the CPU."""
    count = torch.cuda.device_count()
    model: Any = copy.deepcopy(build("llama"))
    depth = model.config.num_hidden_layers
    devices: list[Any] = list(range(count)) if count > 1 else [0, 0, "cpu"]
    layers = {f"model.layers.{i}": devices[i % len(devices)] for i in range(depth)}
    ends = dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), 0)
    # As with `device_map="auto"`.
    ends |= dict.fromkeys(("model.norm", "lm_head"), devices[-1])
    model = dispatch_model(model, {**ends, **layers}, offload_dir=tmp_path)
    before = hooks(model)
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    prompt = settled_prompt("llama").to("cuda:0")
    plain = model.generate(prompt, **call)
    got = model.generate(prompt, **call, **assistant_of(model, "llama", strategy))
    assert got.tolist() == plain.tolist()
    assert hooks(model) == before

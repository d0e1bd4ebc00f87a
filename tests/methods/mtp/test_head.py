"""MTP heads without a drafter: the files they are read from, and an unchanged target."""

from __future__ import annotations

import pytest
import torch

from hf_spec.methods.mtp.head import canonical_names, find_module, head_of_target_files
from tests.mtp_reference import sample


def test_tensors_are_those_of_the_files() -> None:
    found = sample("llama", "index")
    head = found.head
    assert torch.equal(head.joined["projection"].weight, found.parts["eh_proj"])
    assert torch.equal(head.joined["embedding_norm"].weight, found.parts["enorm"])
    assert torch.equal(head.head.norm.weight, found.parts["shared_head.norm"])
    name = "mlp.down_proj.weight"
    assert torch.equal(head.attention.layers[0].state_dict()[name], found.layer[name])


def test_embedding_and_head_are_the_targets() -> None:
    found = sample("llama", "index")
    head, model = found.head, found.model
    assert head.head.scores is model.get_output_embeddings()
    tables = {id(model.get_input_embeddings().weight)}
    assert not tables & {id(weight) for weight in head.parameters()}


@pytest.mark.parametrize("layout", ["index", "qwen"])
def test_the_first_position_is_hidden_where_the_family_does(layout: str) -> None:
    head = sample("llama", layout).head
    seen = []
    handle = head.joined["embedding_norm"].register_forward_hook(lambda m, i, o: seen.append(i[0]))
    mixed = torch.ones(1, 2, 2 * head.hidden_size)
    head.attend(mixed, attention_mask=None, position_ids=torch.tensor([[0, 1]]))
    handle.remove()
    assert bool(seen[0][0, 0].any()) == (layout == "qwen")
    assert bool(seen[0][0, 1].all())


def test_a_target_is_left_as_it_is() -> None:
    model = sample("llama", "qwen").model
    before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    depth, config = len(model.get_decoder().layers), model.config.to_dict()
    head_of_target_files(model)
    assert len(model.get_decoder().layers) == depth
    assert model.config.to_dict() == config
    after = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    assert after == before


def test_a_layer_with_experts_and_one_without() -> None:
    assert hasattr(sample("deepseek_v3", "index").head.attention.layers[0].mlp, "experts")
    assert not hasattr(sample("llama", "index").head.attention.layers[0].mlp, "experts")


@pytest.mark.parametrize(
    ("name", "num_layers", "prefix"),
    [
        ("model.layers.61.eh_proj.weight", 61, "model.layers.61."),
        ("model.layers.4.eh_proj.weight", 4, "model.layers.4."),
        ("model.language_model.layers.46.eh_proj.weight", 46, "model.language_model.layers.46."),
        ("mtp.fc.weight", 3, "mtp."),
        ("model.mtp_layers.0.input_proj.weight", 3, "model.mtp_layers.0."),
        ("mtp_layers.0.input_proj.weight", 3, "mtp_layers.0."),
    ],
)
def test_every_layout(name: str, num_layers: int, prefix: str) -> None:
    found = find_module(["model.norm.weight", name], num_layers)
    assert found is not None
    assert found[1] == prefix


def test_the_first_module_of_several() -> None:
    names = [f"model.layers.{n}.eh_proj.weight" for n in (12, 10, 11)]
    found = find_module(names, 10)
    assert found is not None
    assert found[1] == "model.layers.10."


@pytest.mark.parametrize("name", ["model.layers.3.eh_proj.weight", "fc.weight", "mtp.fc.bias"])
def test_what_is_none(name: str) -> None:
    assert find_module([name], 4) is None


def test_canonical_names_leave_copies_and_other_modules_out() -> None:
    names = [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.mlp.gate.weight",
        "mtp.layers.1.mlp.gate.weight",
        "model.norm.weight",
    ]
    found = find_module(names, 4)
    assert found is not None
    assert dict(canonical_names(names, *found)) == {
        "mtp.fc.weight": "projection.weight",
        "mtp.norm.weight": "norm.weight",
        "mtp.pre_fc_norm_hidden.weight": "feature_norm.weight",
        "mtp.layers.0.mlp.gate.weight": "layer.mlp.gate.weight",
    }
    copies = ["embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight"]
    names = [f"model.layers.4.{name}" for name in ["eh_proj.weight", *copies]]
    found = find_module(names, 4)
    assert found is not None
    assert set(canonical_names(names, *found).values()) == {"projection.weight", "norm.weight"}

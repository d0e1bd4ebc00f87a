"""Steps: one set of segments, and the form of it that each backend reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kernel_layout import ragged_layout, segment_slot_mapping, tensors_of
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.packing import PackedInputs, pack
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.sdpa_attention import group_segments
from hf_spec.engine.forward.step import PackedStep, storing_layers

CPU = torch.device("cpu")


def packed() -> PackedInputs:
    """Return a row with pending tokens, and one that runs only its last level."""
    tree = DraftTree.from_rows(
        [([8, 20, 21, 22, 23, 24], [-1, 0, 0, 1, 2, 4]), ([], []), ([42, 50, 51], [-1, 0, 0])]
    )
    nodes = [0, 1, 2, 3, 4, 5]
    work = [RowWork(0, 11, [5, 6, 7], nodes, nodes, 6), RowWork(2, 4, [], [7, 8], [1, 2], 3)]
    return pack(work, tree)


def host_tensors(step: PackedStep) -> list[Tensor]:
    layout, mapping = step.on_host
    return [mapping, *tensors_of(layout)]


def test_every_form_is_derived_from_the_segments() -> None:
    segments = packed().segments
    step = PackedStep(KVPool(3), segments)
    expected = [segment_slot_mapping(segments), *tensors_of(ragged_layout(segments))]
    assert all(map(torch.equal, host_tensors(step), expected))
    assert [g.first for g in step.groups] == [g.first for g in group_segments(segments)]
    slots, indices = step.target(CPU)
    assert isinstance(slots, Tensor)
    assert isinstance(indices, Tensor)
    assert torch.equal(torch.stack([slots, indices]), step.slot_mapping)


def test_a_step_makes_its_layout_once() -> None:
    step = PackedStep(KVPool(3), packed().segments)
    layout, mapping = step.layout(CPU)
    again = step.layout(CPU)
    assert again[0] is layout
    assert again[1] is mapping


def test_a_step_of_a_layout_has_no_other_form() -> None:
    layout, mapping = PackedStep(KVPool(3), packed().segments).on_host
    step = PackedStep.of_layout(KVPool(3), layout, mapping, CPU)
    assert step.layout(CPU) == (layout, mapping)
    assert not step.segments


@pytest.mark.gpu
def test_it_goes_to_the_device_asked_for() -> None:
    device = torch.device("cuda", 0)
    inputs = packed()
    step = PackedStep(KVPool(3), inputs.segments)
    (tokens,) = step.send(device, torch.tensor(inputs.tokens))
    assert (tokens.device, tokens.tolist()) == (device, inputs.tokens)
    layout, mapping = step.layout(device)
    for sent, host in zip([mapping, *tensors_of(layout)], host_tensors(step), strict=True):
        assert (sent.device, sent.dtype) == (device, host.dtype)
        assert sent.tolist() == host.tolist()


def test_the_layers_that_others_may_share() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = SimpleNamespace(layer_types=kinds, num_hidden_layers=6, num_kv_shared_layers=3)
    assert storing_layers(config) == {"sliding_attention": 2, "full_attention": 1}
    assert storing_layers(SimpleNamespace(num_hidden_layers=3)) == {"full_attention": 2}

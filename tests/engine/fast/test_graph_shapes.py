"""Shapes of steps: the sizes a step is padded to, and the steps that fit into a shape."""

from __future__ import annotations

import torch

from hf_spec.engine.fast.graph_shapes import Bucket, GraphInputs, Inputs, Shape
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kernel_layout import tensors_of
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.packing import pack
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.step import PackedStep

CPU = torch.device("cpu")


def step_of(nodes: int) -> PackedStep:
    every = list(range(nodes))
    tree = DraftTree.from_rows([(every, [-1, *([0] * (nodes - 1))])])
    packed = pack([RowWork(0, 9, [], every, every, nodes)], tree)
    return PackedStep(KVPool(1), packed.segments)


def inputs_of(nodes: int, kept: int = 2, dtype: torch.dtype = torch.long) -> GraphInputs:
    tensors = [torch.arange(nodes) + 1, torch.arange(kept, dtype=dtype)]
    return GraphInputs([Inputs(tensors, *step_of(nodes).on_host)])


def test_a_step_stands_padded_where_its_shape_is() -> None:
    first, second = inputs_of(5), inputs_of(6, kept=1)
    shape = Shape(Bucket.of(first), first, 256, CPU)
    (buffers,) = shape.steps
    addresses = [tensor.data_ptr() for tensor in buffers.inputs]
    for graph_inputs in (first, second):
        shape.fill(graph_inputs)
        (inputs,) = graph_inputs.steps
        count = len(inputs.tensors[0])
        assert buffers.inputs[0].tolist() == [*range(1, count + 1), *([0] * (6 - count))]
        layout, where = buffers.step(KVPool(1)).layout(CPU)
        assert where[:, :count].tolist() == inputs.slot_mapping.tolist()
        assert (where[:, count:] == -1).all()
        assert layout.position[:count].tolist() == inputs.layout.position.tolist()
        assert [t.shape for t in tensors_of(layout)] == [
            t.shape for t in tensors_of(buffers.step(KVPool(1)).layout(CPU)[0])
        ]
    assert [tensor.data_ptr() for tensor in buffers.inputs] == addresses


def test_what_a_shape_holds() -> None:
    bucket = Bucket.of(inputs_of(8, kept=4))
    held = [nodes for nodes in range(1, 12) if bucket.holds(inputs_of(nodes))]
    assert held == [4, 5, 6, 7, 8], "not less than half of it"
    assert bucket.holds(inputs_of(8, kept=4))
    assert not bucket.holds(inputs_of(8, kept=5))
    assert not bucket.holds(inputs_of(8, dtype=torch.int32))

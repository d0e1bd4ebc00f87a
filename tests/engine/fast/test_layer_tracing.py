"""Keys and contents of compiled layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_spec.backend.cpu.layer_text import SourceError
from hf_spec.engine.fast.layer_tracing import LayerCall, compile_layer, tensors_of
from tests import tiny_models
from tests.compiler import needs_compiler


def call(tokens: int, *rest: Any) -> LayerCall:
    states, pair = torch.zeros(1, tokens, 8), torch.zeros(1, tokens, 4)
    return LayerCall((states,), {"rotation": (pair, pair), "rest": rest, "spec_step": None})


def test_calls_of_a_program_differ_in_length_alone() -> None:
    assert call(2).program_key == call(3).program_key == call(8).program_key
    assert call(1).program_key == call(2).program_key
    assert call(2, True).program_key != call(2, False).program_key
    assert call(2, object()).program_key is None


@needs_compiler
def test_a_layer_is_one_function() -> None:
    layer = copy.deepcopy(tiny_models.build("llama")).model.layers[0].mlp
    call = LayerCall((torch.randn(1, 1, 32),), {})
    program = compile_layer(layer, tensors_of(layer), call)
    assert [one.rows for one in program.source.linears] == [1, 1, 1]
    assert program.source.attention is None
    assert program.form.filled([call.tensors[0]]) is call.tensors[0]


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(SourceError, match="neither a tensor nor a plain value"):
        compile_layer(nn.Identity(), {}, call(2, object()))

"""Tree attention against its definition: every node attends along its own path."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward import tree_attention as tree_attention_module
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.forward.tree_attention import (
    NAME,
    PackedAttention,
    tree_attention,
)
from tests import tiny_models

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
# Committed tokens per row, and the tree after them (its root included).
COMMITTED = (11, 0, 5)
ROWS = [
    ([0] * 7, [-1, 0, 0, 1, 1, 2, 5]),
    ([0] * 1, [-1]),
    ([0] * 4, [-1, 0, 1, 0]),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.9},
    "window": {"sliding_window": 4},
    "window of one": {"sliding_window": 1},
    "window beyond all": {"sliding_window": 64},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "window, softcap and sinks": {
        "sliding_window": 3,
        "softcap": 2.0,
        "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    },
}


class Layer(nn.Module):
    """Attention layer with only the attributes that the function reads."""

    def __init__(self, key_heads: int):
        super().__init__()
        self.layer_idx = 0
        self.num_key_value_groups = HEADS // key_heads
        self.is_causal = True


@dataclass
class Case:
    """Random states of a packed step, both stored and new."""

    tree: DraftTree
    pool: KVPool
    step: PackedStep
    query: Tensor
    key: Tensor
    value: Tensor


def make_case(key_heads: int, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    tree = DraftTree.from_rows(ROWS)
    total = tree.num_nodes
    query = torch.randn(1, HEADS, total, WIDTH, dtype=torch.float64)
    key = torch.randn(1, key_heads, total, WIDTH, dtype=torch.float64)
    value = torch.randn(1, key_heads, total, VALUE_WIDTH, dtype=torch.float64)
    pool = KVPool(len(ROWS))
    for buffer in pool.layer(0, key, value):
        buffer.normal_()
    segments = []
    for row, committed in enumerate(COMMITTED):
        nodes = tree.nodes(row)
        depth = torch.tensor(tree.depth[nodes.start : nodes.stop])
        visible = torch.ones(len(nodes), committed + len(nodes), dtype=torch.bool)
        own = slice(nodes.start, nodes.stop)
        visible[:, committed:] = tree.ancestor_mask[own, : len(nodes)]
        position = committed + depth
        segments.append(
            Segment(
                slot=row,
                start=nodes.start,
                end=nodes.stop,
                num_keys=committed + len(nodes),
                position=position,
                last_position=int(position.max()),
                tail_position=position,
                seen=visible[:, committed:],
                prefix=committed,
                cache_indices=range(committed, committed + len(nodes)),
            )
        )
    return Case(tree, pool, PackedStep(pool, segments), query, key, value)


def attend(case: Case, **options: Any) -> Tensor:
    """Return the function's output (1, N, H, D) in a new step."""
    key_heads = case.key.shape[1]
    step = dataclasses.replace(case.step, written={})
    query, key, value = case.query, case.key, case.value
    out, weights = tree_attention(
        Layer(key_heads), query, key, value, None, spec_step=step, **options
    )
    assert weights is None
    return out


def attend_along_paths(
    case: Case,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Return (1, N, H, D), the textbook sum per node and head over the tokens of the path."""
    tree = case.tree
    out = torch.zeros(1, case.tree.num_nodes, HEADS, VALUE_WIDTH, dtype=torch.float64)
    groups = HEADS // case.key.shape[1]
    for row, committed in enumerate(COMMITTED):
        for node in tree.nodes(row):
            path = [node]
            while tree.parent[path[0]] >= 0:
                path.insert(0, tree.parent[path[0]])
            for head in range(HEADS):
                of = head // groups
                stored = slice(0, committed)
                keys = torch.cat([case.pool.keys[0][row, of, stored], case.key[0, of, path]])
                values = torch.cat([case.pool.values[0][row, of, stored], case.value[0, of, path]])
                scores = keys @ case.query[0, head, node] * (scaling or 1 / math.sqrt(WIDTH))
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                # The path is contiguous, so its own length counts true positions.
                if sliding_window:
                    scores[: max(0, len(scores) - sliding_window)] = -math.inf
                weights = scores.exp()
                total = weights.sum()
                if s_aux is not None:
                    total = total + s_aux[head].double().exp()
                out[0, node, head] = (weights / total) @ values
    return out


@pytest.mark.parametrize("key_heads", [HEADS, KV_HEADS, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_node_attends_along_its_own_path(name: str, key_heads: int) -> None:
    case = make_case(key_heads)
    options = OPTIONS[name]
    out = attend(case, **options)
    # float64 throughout, except that the manual softmax goes through float32.
    exact = not {"softcap", "s_aux"} & set(options)
    expected = attend_along_paths(case, **options)
    torch.testing.assert_close(out, expected, atol=1e-12 if exact else 1e-6, rtol=0)


def test_the_window_counts_positions_not_storage_entries() -> None:
    """Node 6 of row 0 sees its grandparent 2: two positions before it, but four indices."""
    case = make_case(KV_HEADS)
    before = attend(case, sliding_window=3)
    case.value = case.value.clone()
    case.value[0, :, 2] += 1
    after = attend(case, sliding_window=3)
    moved = (before != after).any(dim=-1).all(dim=-1)[0].nonzero().flatten().tolist()
    assert moved == [2, 5, 6]


class WindowInMask(Layer):
    """Layer of a model that applies the window only in its mask."""

    def __init__(self, **config: Any):
        super().__init__(KV_HEADS)
        self.config = LlamaConfig(**config)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, None),
        ({"sliding_window": 4}, 4),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, 4),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, None),
    ],
    ids=["none", "all layers", "sliding layer", "full layer"],
)
def test_a_window_that_is_not_passed_on_comes_from_the_config(
    config: dict[str, Any], window: int | None
) -> None:
    case = make_case(KV_HEADS)
    layer = WindowInMask(num_hidden_layers=1, **config)
    query, key, value = case.query, case.key, case.value
    out, _ = tree_attention(layer, query, key, value, None, spec_step=case.step)
    torch.testing.assert_close(out, attend_along_paths(case, sliding_window=window))


def test_a_window_that_is_passed_on_has_the_last_word() -> None:
    """Exaone 4 stores the window on every layer and passes None for full-attention layers."""
    case = make_case(KV_HEADS)
    layer = WindowInMask(num_hidden_layers=1, sliding_window=4)
    layer.sliding_window = 4
    query, key, value = case.query, case.key, case.value
    out, _ = tree_attention(
        layer, query, key, value, None, spec_step=case.step, sliding_window=None
    )
    torch.testing.assert_close(out, attend_along_paths(case))


def test_a_layer_that_attends_twice_is_refused() -> None:
    case = make_case(KV_HEADS)
    query, key, value = case.query, case.key, case.value
    tree_attention(Layer(KV_HEADS), query, key, value, None, spec_step=case.step)
    with pytest.raises(UnsupportedError, match="Layer 0 attends twice"):
        tree_attention(Layer(KV_HEADS), query, key, value, None, spec_step=case.step)


def test_new_keys_and_values_are_stored_in_their_slots() -> None:
    case = make_case(KV_HEADS)
    before = case.pool.keys[0].clone(), case.pool.values[0].clone()
    attend(case)
    buffers = case.pool.keys[0], case.pool.values[0]
    for buffer, old, new in zip(buffers, before, (case.key, case.value), strict=True):
        for row, committed in enumerate(COMMITTED):
            nodes = case.tree.nodes(row)
            end = committed + len(nodes)
            assert torch.equal(buffer[row, :, committed:end], new[0, :, nodes.start : nodes.stop])
            assert torch.equal(buffer[row, :, :committed], old[row, :, :committed])
            assert torch.equal(buffer[row, :, end:], old[row, :, end:])


@pytest.mark.parametrize("kernel", [None, "torch"], ids=["segments", "kernel"])
def test_under_autocast_all_states_get_the_dtype_of_the_values(
    kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary embeddings make queries and keys float32 there; kernels take one dtype."""
    seen = []

    def attend(step: Any, kernel: Any, query: Tensor, buffers: Any, scoring: Any) -> Tensor:
        seen.extend(states.dtype for states in (query, *buffers))
        return run(step, kernel, query, buffers, scoring)

    run = tree_attention_module._attend
    monkeypatch.setattr(tree_attention_module, "_attend", attend)
    monkeypatch.setattr(tree_attention_module, "select_kernel", lambda *_: kernel)
    model, prompt = tiny_models.build("llama"), tiny_models.settled_prompt("llama")
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(prompt, max_new_tokens=8, spec_strategy="lookup")
        assert torch.equal(found, model.generate(prompt, max_new_tokens=8))
    assert set(seen) == {torch.bfloat16}


def test_without_a_step_it_refuses() -> None:
    """The call lacks the information to attend like the model's own attention."""
    states = torch.zeros(2, HEADS, 5, WIDTH)
    with pytest.raises(UnsupportedError, match="without a draft tree"):
        tree_attention(Layer(KV_HEADS), states, states, states, None)


def test_the_name_holds_for_one_model_in_one_block() -> None:
    """Other models keep their attention, and the chosen one gets its own back afterwards."""
    model, other = tiny_models.build("llama"), tiny_models.build("gemma3")
    before = model.config._attn_implementation
    attention = PackedAttention(model)
    with attention.active():
        assert model.config._attn_implementation == NAME
        assert other.config._attn_implementation != NAME
        with PackedAttention(other).active():
            assert model.config._attn_implementation == before
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before


def test_the_name_goes_after_an_exception() -> None:
    model = tiny_models.build("llama")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="interrupted"), PackedAttention(model).active():
        raise RuntimeError("interrupted")
    assert model.config._attn_implementation == before


def test_the_name_is_no_part_of_a_config() -> None:
    """A config that is copied, compared or saved during a forward pass is the user's own."""
    model = tiny_models.build("llama")
    with PackedAttention(model).active():
        copied = copy.deepcopy(model.config)
        assert copied == model.config
    assert copied._attn_implementation == model.config._attn_implementation


def test_a_config_with_an_answer_of_its_own_is_chosen_too() -> None:
    class OwnConfig(LlamaConfig):
        @property
        def _attn_implementation(self) -> str | None:
            return self._attn_implementation_internal

        @_attn_implementation.setter
        def _attn_implementation(self, value: str | None) -> None:
            self._attn_implementation_internal = value

    config = OwnConfig(**tiny_models.build("llama").config.to_diff_dict())
    model = LlamaForCausalLM(config)
    with PackedAttention(model).active():
        assert config._attn_implementation == NAME
    assert config._attn_implementation != NAME


def test_what_lies_behind_the_visible_keys_changes_nothing() -> None:
    """Rejected drafts leave garbage there."""
    case = make_case(KV_HEADS)
    out = attend(case)
    for row, committed in enumerate(COMMITTED):
        end = committed + len(case.tree.nodes(row))
        case.pool.keys[0][row, :, end:] = 1e6
        case.pool.values[0][row, :, end:] = 1e6
    assert torch.equal(out, attend(case))

"""Model runner: correct logits for every node, no wasted tokens, and an unchanged model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_spec
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine import runner as runner_module
from hf_spec.engine.forward import tree_attention as attention
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import MIN_CAPACITY, KVPool
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.engine.runner import ModelRunner
from tests import tiny_models
from tests.model_watch import snapshot
from tests.plain_logits import expected_logits, path_to

# The packed path with and without a window, and the rectangular one with and without ALiBi.
MODELS = ["llama", "gemma3", "mistral_sliding", "gptj", "falcon_alibi", "bloom"]
SEQUENCES = [[5, 6, 7, 5, 6, 7, 5, 6, 9, 11, 4, 8], [42], [7, 7, 3, 9, 30]]
TREE = [
    ([8, 20, 21, 22, 23, 24], [-1, 0, 0, 1, 2, 4]),
    ([42, 50, 51], [-1, 0, 0]),
    ([30], [-1]),
    ([], []),
]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def sequences() -> list[list[int]]:
    return [list(row) for row in SEQUENCES] + [[1, 2, 3]]


def close(actual: Tensor, expected: Tensor) -> None:
    # float32 sums in a different order; a wrong mask or position changes logits by whole units.
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@contextmanager
def tokens_entering(layer: nn.Module) -> Iterator[list[int]]:
    """Record the number of tokens in each call of a linear layer."""
    counts: list[int] = []
    handle = layer.register_forward_pre_hook(
        lambda _, args: counts.append(args[0].numel() // args[0].shape[-1])
    )
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.parametrize("name", MODELS)
def test_every_node_gets_the_logits_of_its_own_path(name: str) -> None:
    model = tiny_models.build(name)
    tree = DraftTree.from_rows(TREE)
    with ModelRunner(model, 4).active() as runner:
        output = runner.forward(tree, sequences())
    close(output.logits, expected_logits(model, tree, sequences()))
    assert runner.rows.stored == [len(row) - 1 for row in SEQUENCES] + [0]


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("name", MODELS)
def test_growing_a_tree_node_by_node_is_one_forward(name: str, batching: str) -> None:
    model = tiny_models.build(name)
    tree = DraftTree.from_rows(TREE)
    levels = [[n for n in range(tree.num_nodes) if tree.depth[n] == d] for d in range(4)]
    with ModelRunner(model, 4, batching=batching).active() as whole:
        together = whole.forward(tree, sequences()).logits
    with ModelRunner(model, 4, batching=batching).active() as runner:
        for level in levels:
            output = runner.forward(tree, sequences(), level)
            close(output.logits, together[level])
        # Keys and values stored level by level are valid in the next round as well.
        runner.keep([[2, 4, 5], [1], [], []])
        whole.keep([[2, 4, 5], [1], [], []])
        assert runner.rows.stored == whole.rows.stored == [15, 2, 5, 0]


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("name", MODELS)
def test_rounds_continue_from_the_accepted_path(name: str, batching: str) -> None:
    model = tiny_models.build(name)
    rows = sequences()
    with ModelRunner(model, 4, batching=batching).active() as runner:
        runner.forward(DraftTree.from_rows(TREE), rows)
        runner.keep([[2, 4, 5], [2], [], []])
        rows[0] += [21, 23, 24, 60]
        rows[1] += [51, 61]
        rows[2] += [62]
        trees = [([60, 1, 2], [-1, 0, 0]), ([61], [-1]), ([62, 3], [-1, 0]), ([], [])]
        tree = DraftTree.from_rows(trees)
        close(runner.forward(tree, rows).logits, expected_logits(model, tree, rows))
        # A row that skipped a round catches up.
        runner.keep([[1], [], [], []])
        rows[0] += [1, 70]
        rows[1] += [71]
        tree = DraftTree.from_rows([([70], [-1]), ([], []), ([], []), ([], [])])
        close(runner.forward(tree, rows).logits, expected_logits(model, tree, rows))
        runner.keep([[], [], [], []])
        rows[0] += [72]
        rows[1] += [73, 74]
        tree = DraftTree.from_rows([([72], [-1]), ([74, 5], [-1, 0]), ([], []), ([], [])])
        close(runner.forward(tree, rows).logits, expected_logits(model, tree, rows))


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_in_stretches_is_the_same(
    name: str, batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.build(name)
    tree = DraftTree.from_rows(TREE)
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(runner_module, "STEP_TOKENS", 4)
    rows = sequences()
    with ModelRunner(model, 4, batching=batching).active() as runner:
        output = runner.forward(tree, rows)
        close(output.logits, expected_logits(model, tree, rows))
        assert runner.forwards == 3, "11 pending tokens: 4, 4, and 3 with the trees"
        # Padding of rows that waited for the long one overwrote nothing.
        runner.keep([[2, 4, 5], [2], [], []])
        for row, more in enumerate(([21, 23, 24, 60], [51, 61], [62])):
            rows[row] += more
        after = DraftTree.from_rows([*(([row[-1]], [-1]) for row in rows[:3]), ([], [])])
        close(runner.forward(after, rows).logits, expected_logits(model, after, rows))


def test_tokens_entering_the_linear_layers_are_pending_tokens_and_nodes() -> None:
    """There is no padding for prompts, for rows with smaller trees, or for finished rows."""
    model = tiny_models.build("llama")
    projection = model.model.layers[-1].self_attn.q_proj
    tree = DraftTree.from_rows(TREE)
    pending = sum(len(row) - 1 for row in SEQUENCES)
    with ModelRunner(model, 4).active() as runner, tokens_entering(projection) as counts:
        runner.forward(tree, sequences())
        runner.forward(tree, sequences())
    assert counts == [pending + tree.num_nodes, tree.num_nodes]
    assert runner.tokens_run == sum(counts)


def test_the_head_sees_nodes_only() -> None:
    model = tiny_models.build("llama")
    tree = DraftTree.from_rows(TREE)
    with ModelRunner(model, 4).active() as runner, tokens_entering(model.lm_head) as counts:
        runner.forward(tree, sequences())
    assert counts == [tree.num_nodes]


def test_depths_end_at_the_last_position() -> None:
    """A node at depth d of n tokens has the position n - 1 + d; GPT-2 has 256 positions."""
    sequences = [[5] * length for length in (3, 250, 256, 257, 300)]
    limits = dict.fromkeys(range(5), 10)
    runner = ModelRunner(tiny_models.build("gpt2"), 5)
    assert runner.limit_depths(limits, sequences) == {0: 10, 1: 6, 2: 0, 3: 0, 4: 0}
    # A root that cannot run has no draft.
    assert runner.limit_depths(limits, sequences, unrun=1) == {0: 10, 1: 7, 2: 1, 3: 0, 4: 0}
    runner.rows.position_offsets[:2] = [-4, 4]
    assert runner.limit_depths({0: 255, 1: 10}, sequences) == {0: 255, 1: 2}
    rotary = ModelRunner(tiny_models.build("llama"), 5)
    assert rotary.limit_depths(limits, sequences) == limits


@pytest.mark.parametrize("batching", ["unpadded_kv", "padded"])
def test_padded_inputs_have_one_length_for_all_rows(batching: str) -> None:
    """This includes finished rows, as in a rectangle; the head runs equally many tokens per row."""
    model = tiny_models.build("llama")
    projection, tree = model.model.layers[-1].self_attn.q_proj, DraftTree.from_rows(TREE)
    runner = ModelRunner(model, 4, batching=batching)
    with (
        runner.active(),
        tokens_entering(projection) as counts,
        tokens_entering(model.lm_head) as head,
    ):
        runner.forward(tree, sequences())
        runner.forward(tree, sequences())
    # Row 0 has 11 pending tokens and 6 nodes.
    assert counts == [4 * 17, 4 * 6]
    # The head runs as many tokens of each row as the largest tree has nodes.
    assert head[1] == 4 * 6
    assert runner.tokens_run == sum(counts)
    assert runner.padding_run == 3 * 17 + 3 * 6 - (3 + 1 + 4) - (3 + 1)


def test_a_rectangle_counts_its_padding() -> None:
    model, tree = tiny_models.build("bloom"), DraftTree.from_rows(TREE)
    with ModelRunner(model, 4).active() as runner:
        runner.forward(tree, sequences())
    assert runner.tokens_run == 4 * 17
    assert runner.padding_run == 4 * 17 - 17 - 3 - 5


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_memory_grows_by_doubling_only(name: str) -> None:
    model = tiny_models.build(name)
    rows = [[3], [4, 5]]
    sizes = []
    with ModelRunner(model, 2).active() as runner:
        for step in range(60):
            tree = DraftTree.from_rows([([row[-1], 9, 9, 9], [-1, 0, 1, 0]) for row in rows])
            runner.forward(tree, rows)
            runner.keep([[1, 2], []])
            rows[0] += [9, 9, 10 + step % 50]
            rows[1] += [10 + step % 50]
            assert runner.rows.stored == [len(row) - 1 for row in rows]
            sizes.append(runner.rows.pool.nbytes())
    assert len(rows[0]) < MIN_CAPACITY
    assert len(set(sizes)) == 1
    assert runner.rows.pool.capacity == MIN_CAPACITY


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_the_tokens(name: str) -> None:
    model = tiny_models.build(name)
    layers = (1, 3)
    tree = DraftTree.from_rows(TREE)
    with ModelRunner(model, 4, hidden_layers=layers).active() as runner:
        output = runner.forward(tree, sequences())
    assert sorted(output.hidden) == list(layers)
    for layer in layers:
        close(output.hidden[layer][output.nodes], hidden_of_nodes(model, tree, layer))
        check_pending(model, output, layer)


def hidden_of_nodes(model: PreTrainedModel, tree: DraftTree, layer: int) -> Tensor:
    rows = sequences()
    states = []
    for row, tokens in enumerate(rows):
        for node in tree.nodes(row):
            text = torch.tensor([tokens + path_to(tree, node)])
            plain = model(text, output_hidden_states=True)
            states.append(plain.hidden_states[layer][0, -1])
    return torch.stack(states)


def check_pending(model: PreTrainedModel, output: ForwardOutput, layer: int) -> None:
    for index, row in enumerate(SEQUENCES):
        indices = output.pending.get(index, [])
        assert len(indices) == len(row) - 1
        plain = model(torch.tensor([row]), output_hidden_states=True).hidden_states[layer][0]
        close(output.hidden[layer][indices], plain[:-1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_left_as_found(name: str, error: type[BaseException] | None) -> None:
    model = tiny_models.build(name)
    before = snapshot(model)
    tree = DraftTree.from_rows(TREE)

    def fail(*args: Any) -> None:
        if error is not None:
            raise error("in the middle of a forward")

    last_block = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[-1]
    handle = last_block.register_forward_pre_hook(fail)
    expectation = nullcontext() if error is None else pytest.raises(error)
    with expectation, ModelRunner(model, 4).active() as runner:
        runner.forward(tree, sequences())
    handle.remove()
    after = snapshot(model)
    assert {key for key in before if before[key] != after.get(key)} == set()
    assert set(after) == set(before)


def test_layers_shared_with_a_draft_model_are_left_as_found() -> None:
    """A truncated draft shares the target's layers, which read the target's config."""
    model, draft = tiny_models.build("llama"), tiny_models.draft_model("llama")
    before = snapshot(model), snapshot(draft)
    tree = DraftTree.from_rows(TREE)
    with ModelRunner(draft, 4).active() as runner:
        output = runner.forward(tree, sequences())
    assert (snapshot(model), snapshot(draft)) == before
    close(output.logits, expected_logits(draft, tree, sequences()))


def test_layers_that_drop_keyword_arguments_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree attention never runs in them, so the tokens would be those of a causal model."""
    monkeypatch.setattr(attention, "RECTANGULAR_ONLY", set())
    with (
        ModelRunner(tiny_models.build("nemotron"), 4).active() as runner,
        pytest.raises(UnsupportedError, match="without a draft tree"),
    ):
        runner.forward(DraftTree.from_rows(TREE), sequences())


def test_layers_that_do_not_attend_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that mixes tokens in another way would treat the branches of a tree as one text."""
    model = copy.deepcopy(tiny_models.build("llama"))
    monkeypatch.setattr(
        model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with (
        ModelRunner(model, 4).active() as runner,
        pytest.raises(UnsupportedError, match=r"in 2 of its 3 layers"),
    ):
        runner.forward(DraftTree.from_rows(TREE), sequences())


def test_layers_that_attend_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "RECTANGULAR_ONLY", set())
    with (
        ModelRunner(tiny_models.build("diffllama"), 4).active() as runner,
        pytest.raises(UnsupportedError, match="attends twice"),
    ):
        runner.forward(DraftTree.from_rows(TREE), sequences())


@pytest.mark.by_default(name=("llama",))
@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("strategy", ["lookup", "draft", "tree", "auto"])
def test_keys_and_values_are_freed_with_the_call(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cycle collector is off: memory that waits for it adds up over calls, in gigabytes.
    model = tiny_models.build(name)
    pools: list[weakref.ref[KVPool]] = []
    create = KVPool.__init__

    def remember(self: KVPool, num_slots: int) -> None:
        pools.append(weakref.ref(self))
        create(self, num_slots)

    monkeypatch.setattr(KVPool, "__init__", remember)
    draft = None if strategy == "lookup" else hf_spec.truncated_draft(model, 2)
    gc.collect()
    gc.disable()
    try:
        model.generate(
            tiny_models.repetitive_prompt(),
            max_new_tokens=8,
            do_sample=False,
            spec_strategy=strategy,
            assistant=draft,
            return_dict_in_generate=True,
        )
        assert pools
        assert all(pool() is None for pool in pools)
    finally:
        gc.enable()

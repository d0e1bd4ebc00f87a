"""Recurrent mixers by row: correct logits for every node, correct states, no redundant calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.models.recurrent_layers import COMMITTED, Mixer
from hf_spec.engine.models.recurrent_state import MAX_ENDS
from hf_spec.engine.runner import ModelRunner
from tests.hybrid_models import build
from tests.model_watch import snapshot
from tests.plain_logits import alone, expected_logits

# A delta net, a short convolution, Mamba-2, Mamba-1, and the rectangular path.
MODELS = ("qwen3_5_text", "lfm2", "falcon_h1", "mamba", "zamba")
SEQUENCES = [[5, 6, 7, 5, 6, 7, 5, 6, 9, 11, 4, 8], [42], [7, 7, 3, 9, 30], [1, 2, 3]]
TREE = [
    ([8, 20, 21, 22, 23, 24], [-1, 0, 0, 1, 2, 4]),
    ([42, 50, 51], [-1, 0, 0]),
    ([30], [-1]),
    ([], []),
]
CHAIN = [([8, 20, 21, 22], [-1, 0, 1, 2]), ([], []), ([30, 4, 5, 6], [-1, 0, 1, 2]), ([], [])]
NOTHING: list[list[int]] = [[], [], [], []]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (R, T) of every call of a model's first mixer."""
    found: list[tuple[int, int]] = []
    run = Mixer.run

    def counting(self: Mixer, inputs: Tensor, state: object) -> object:
        if self.index == 0:
            found.append((inputs.shape[0], inputs.shape[1]))
        return run(self, inputs, state)

    monkeypatch.setattr(Mixer, "run", counting)
    return found


def sequences() -> list[list[int]]:
    return [list(row) for row in SEQUENCES]


def close(actual: Tensor, wanted: Tensor) -> None:
    # The two forms of a delta net differ by up to 1e-3; a wrong state changes logits by 1.
    torch.testing.assert_close(actual, wanted, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_every_node_gets_the_logits_of_its_own_path(name: str) -> None:
    model, tree = build(name), DraftTree.from_rows(TREE)
    before = snapshot(model)
    with ModelRunner(model, 4).active() as runner:
        output = runner.forward(tree, sequences())
    close(output.logits, expected_logits(model, tree, sequences()))
    assert snapshot(model) == before


@pytest.mark.parametrize("batching", ["unpadded", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_growing_a_tree_level_by_level_and_going_on_from_it(name: str, batching: str) -> None:
    model, tree, rows = build(name), DraftTree.from_rows(TREE), sequences()
    wanted = expected_logits(model, tree, rows)
    with ModelRunner(model, 4, batching=batching).active() as runner:
        for depth in range(4):
            level = [n for n in range(tree.num_nodes) if tree.depth[n] == depth]
            close(runner.forward(tree, rows, level).logits, wanted[level])
        runner.keep([[2, 4, 5], [1], [], []])
        rows[0] += [21, 23, 24, 60]
        rows[1] += [50, 9]
        rows[2] += [11]
        after = DraftTree.from_rows([([60, 3], [-1, 0]), ([9], [-1]), ([11], [-1]), ([3], [-1])])
        close(runner.forward(after, rows).logits, expected_logits(model, after, rows))


@pytest.mark.parametrize("name", MODELS)
def test_going_on_from_paths_shorter_than_the_longest(name: str) -> None:
    """These paths were padded, so the state after the padding must not be used."""
    model, tree, rows = build(name), DraftTree.from_rows(TREE), sequences()
    with ModelRunner(model, 4).active() as runner:
        runner.forward(tree, rows)
        runner.keep([[1, 3], [2], [], []])
        rows[0] += [20, 22, 60]
        rows[1] += [51, 9]
        rows[2] += [11]
        after = DraftTree.from_rows([([60, 3], [-1, 0]), ([9], [-1]), ([11], [-1]), ([], [])])
        close(runner.forward(after, rows).logits, expected_logits(model, after, rows))


@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_runs_in_stretches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_spec.engine.runner.PREFILL_CHUNK", 5)
    monkeypatch.setattr("hf_spec.engine.runner.STEP_TOKENS", 5)
    model, tree = build(name), DraftTree.from_rows(TREE)
    with ModelRunner(model, 4).active() as runner:
        output = runner.forward(tree, sequences())
    close(output.logits, expected_logits(model, tree, sequences()))


@pytest.mark.parametrize("name", MODELS)
def test_a_row_begins_again(name: str) -> None:
    model, tree, rows = build(name), DraftTree.from_rows(TREE), sequences()
    with ModelRunner(model, 4).active() as runner:
        runner.forward(tree, rows)
        runner.keep([[1, 3], [], [], []])
        runner.restart(0)
        rows[0], rows[1] = [9, 8, 7], [42, 60]
        after = DraftTree.from_rows([([7, 6], [-1, 0]), ([60], [-1]), ([], []), ([], [])])
        close(runner.forward(after, rows).logits, expected_logits(model, after, rows))


def test_too_long_a_row_begins_again() -> None:
    model, rows = build("lfm2"), sequences()
    with ModelRunner(model, 4).active() as runner:
        runner.forward(DraftTree.from_rows(TREE), rows)
        runner.keep([[1, 3], [], [], []])
        runner.shorten(0, runner.rows.stored[0])
        assert runner.rows.stored[0] == len(rows[0]) + 2
        runner.shorten(0, 5)
        assert runner.rows.stored[0] == 0
        after = DraftTree.from_rows([([8], [-1]), ([], []), ([], []), ([], [])])
        close(runner.forward(after, rows).logits, expected_logits(model, after, rows))


def test_rows_of_equal_length_share_a_call(calls: list[tuple[int, int]]) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11]]
    tree = DraftTree.from_rows([([row[-1], 7, 8], [-1, 0, 0]) for row in rows])
    with ModelRunner(build("lfm2"), 4).active() as runner:
        runner.forward(tree, rows)
        assert calls == [(2, 2), (1, 3), (8, 2)]
        runner.keep([[1], [2], [], []])
    # The states at the ends of the two accepted paths are stored already.
    assert calls[3:] == [(2, 1)]


def test_a_chain_that_is_accepted_whole_is_not_run_again(calls: list[tuple[int, int]]) -> None:
    model, tree, rows = build("falcon_h1"), DraftTree.from_rows(CHAIN), sequences()
    with ModelRunner(model, 4).active() as runner:
        runner.forward(tree, rows)
        del calls[:]
        runner.keep([[1, 2, 3], [], [1, 2, 3], []])
        assert calls == []
        rows[0] += [20, 21, 22, 9]
        rows[2] += [4, 5, 6, 9]
        after = DraftTree.from_rows([([9], [-1]), ([], []), ([9], [-1]), ([], [])])
        close(runner.forward(after, rows).logits, expected_logits(model, after, rows))


def test_a_chain_that_grows_runs_every_node_once(calls: list[tuple[int, int]]) -> None:
    model, tree, rows = build("falcon_h1"), DraftTree.from_rows(CHAIN), sequences()
    with ModelRunner(model, 4).active() as runner:
        for depth in range(3):
            runner.forward(tree, rows, [depth, 4 + depth])
        assert calls[-3:] == [(2, 1)] * 3
        runner.keep([[1], [], [], []])
        assert calls[-3:] == [(2, 1)] * 3


def test_few_states_are_kept_in_a_round() -> None:
    width = MAX_ENDS + 1
    tree = DraftTree.from_rows([([8, *range(20, 20 + width)], [-1, *[0] * width])])
    runner = ModelRunner(build("lfm2"), 1)
    with runner.active():
        runner.forward(tree, [SEQUENCES[0]])
        assert runner._mixers is not None
        mixer = next(iter(runner._mixers._mixers.values()))
        assert set(mixer.states) == {COMMITTED}
        runner.keep([[3]])
        assert set(mixer.states) == {COMMITTED}
        assert mixer._inputs is None


def test_forwards_of_others_are_their_own() -> None:
    """A plain forward pass works within an active block, in this thread and in another."""
    model, tree = build("qwen3_5_text"), DraftTree.from_rows(TREE)
    wanted = alone(model, SEQUENCES[0])
    with ModelRunner(model, 4).active() as runner, ModelRunner(model, 4).active() as other:
        runner.forward(tree, sequences())
        other.forward(tree, sequences())
        assert torch.equal(alone(model, SEQUENCES[0]), wanted)
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(alone, model, SEQUENCES[0]).result(), wanted)
        runner.keep([[1], [], [], []])

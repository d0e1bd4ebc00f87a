"""Forward passes of a Gemma assistant, which reads the KV pool of its target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import cuda_graphs
from hf_spec.engine.forward import kv_pool
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.methods.gemma_assistant.runner import AssistantRunner
from tests import tiny_models
from tests.backend.device.test_captured_graphs import by_assistant, decode
from tests.fake_gpu import OnGpu, on_gpu, pretended, recording
from tests.gemma_reference import random_assistant

pytestmark = pytest.mark.usefixtures("no_stored_graphs")


@torch.no_grad()
def test_nodes_take_the_states_of_their_parents() -> None:
    model, assistant = tiny_models.build("llama"), random_assistant("llama")
    runner = AssistantRunner(assistant, model, cached=False)
    storage, states = RowStorage(2), torch.randn(3, assistant.hidden_size)
    for layer in assistant.layers:
        like = torch.randn(1, 2, 1, layer.head_size)
        storage.pool.layer(layer.layer, like, like)
    storage.stored = [4, 7]
    storage.position_offsets = [0, 5]
    rows, tokens, states = [0, 1, 1], torch.tensor([5, 6, 7]), states[[2, 0, 0]]
    with runner.active():
        logits, after = runner.run(runner.prepare(storage, rows, tokens, states))
        for node, row in enumerate(rows):
            one = slice(node, node + 1)
            prepared = runner.prepare(storage, [row], tokens[one], states[one])
            found = runner.run(prepared)
            torch.testing.assert_close(logits[one], found[0])
            torch.testing.assert_close(after[one], found[1])
    assert runner.forwards == 4
    assert (after[0] - after[1]).abs().max() > 1e-3
    assert not storage.pool.before_resize, "graphs are closed"
    with runner.active():
        again, _ = runner.run(runner.prepare(storage, rows, tokens, states))
        assert len(storage.pool.before_resize) == 1, "they are dropped when the pool moves"
    torch.testing.assert_close(again, logits)


@pytest.mark.full
class TestBorrowedPool:
    """CUDA graphs of an assistant, which reads the KV pool of its target."""

    @dataclass
    class Drafts:
        """Number of graphs that the assistant captured in a call, and its drafts."""

        captures: int
        trees: list[Any]

    def drafts(self, model: Any, drafter: Any) -> Drafts:
        trees: list[Any] = []
        draft = type(drafter).draft

        def noted(state: Any, limits: Any) -> Any:
            tree = draft(drafter, state, limits)
            trees.append((tree.tokens, tree.parent))
            return tree

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter, "draft", noted)
            call = decode(model, drafter)
        assert call.head is not None
        return self.Drafts(call.head[1], trees)

    @pytest.fixture
    def parts(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
        head = random_assistant("llama")
        with pretended(monkeypatch) as gpu, recording(monkeypatch, gpu):
            model = on_gpu(tiny_models.build("llama"))
            yield model, by_assistant(on_gpu(head), model)

    @pytest.fixture
    def expected(self, parts: tuple[Any, Any]) -> list[Any]:
        with cuda_graphs("off"):
            found = self.drafts(*parts)
        assert found.captures == 0
        assert len({str(tree) for tree in found.trees}) > 10
        return found.trees

    def test_the_pool_stays(self, parts: tuple[Any, Any], expected: list[Any]) -> None:
        first, again = self.drafts(*parts), self.drafts(*parts)
        assert first.captures > 0
        assert again.captures == 0
        assert first.trees == again.trees == expected

    def test_the_pool_grows(
        self, parts: tuple[Any, Any], expected: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = self.drafts(*parts)
        graph_store.forget()
        monkeypatch.setattr(kv_pool, "MAX_RESERVED", 16)
        grown = self.drafts(*parts)
        assert grown.captures > whole.captures
        assert grown.trees == expected

    def test_another_pool(self, parts: tuple[Any, Any], expected: list[Any]) -> None:
        """The target's graphs and pool are deleted, but the assistant's graphs are not."""
        self.drafts(*parts)
        del graph_store._stored[parts[0]]
        other = self.drafts(*parts)
        assert other.captures > 0
        assert other.trees == expected

    def test_another_embedding(self, parts: tuple[Any, Any]) -> None:
        """The assistant reads the target's embedding, but does not contain it."""
        model, drafter = parts
        assert self.drafts(model, drafter).captures > 0
        embedding = model.get_input_embeddings()
        embedding._parameters["weight"] = OnGpu(embedding.weight.held.flip(0))
        assert self.drafts(model, drafter).captures > 0

    def test_an_embedding_with_hooks(self, parts: tuple[Any, Any]) -> None:
        model, drafter = parts
        with model.get_input_embeddings().register_forward_hook(lambda *_: None):
            head = decode(model, drafter).head
        assert head == (0, 0, "the target's Embedding has hooks")

    def test_keys_elsewhere(self, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        devices = {torch.device("cuda", 1), torch.device("meta")}
        monkeypatch.setattr(kv_pool.KVPool, "devices", lambda _: devices)
        head = decode(*parts).head
        assert head == (0, 0, "keys and values of the target are on other devices")

"""Runs one Hugging Face model on draft trees, with its own keys and values per row.

The same class serves the target and draft models. `forward` runs whatever is not stored yet (see
`row_storage`), so the prompt, a reused cache, a draft model that has to catch up and the growth of
a draft tree level by level are one mechanism. A prompt shares its first forward with the first
draft, and with the drafts of the other rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_spec.backend.device import transfer
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import output_cache
from hf_spec.engine.fast.compiled_layers import CompiledLayers, uncompiled
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.device_tokens import DeviceTokens
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import PoolCache
from hf_spec.engine.forward.model_call import ModelCall
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.packing import PackedInputs, RectangularInputs, align_right, pack
from hf_spec.engine.forward.row_batch import BATCHING, RowWork, fill_up
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.forward.tree_attention import PackedAttention, PackedStep, takes_packed
from hf_spec.engine.forward.virtual_tokens import VirtualTokens
from hf_spec.engine.models.alibi import tree_alibi
from hf_spec.engine.models.cross_attention import CrossAttention, decoding_parts, num_layers
from hf_spec.engine.models.latent_kv import expanded
from hf_spec.engine.models.query_scaling import TokenPlaces, scales_by_place
from hf_spec.engine.models.recurrent_layers import mixers_of, num_attention_layers
from hf_spec.engine.models.recurrent_state import RecurrentMixers

# A long prompt is run in stretches of this many tokens per row; bounds masks and activations.
PREFILL_CHUNK = 1024


class ModelRunner(RowStorage):
    """A model, its key-value pool and the forward pass over packed trees.

    Args:
        model: a causal language model, or an encoder-decoder of which it runs the decoder.
        num_rows: B, how many sequences share the pool.
        hidden_layers: indices into `hidden_states` that each forward returns, or `BEFORE_NORM`.
        virtual_tokens: what the nodes with negative token ids stand for, if there are any.
        batching: what is padded, a key of `BATCHING`.
        vocab_size: V of the sequences and the logits, where the model's own differs by padding.

    Attributes:
        forwards: forward passes so far.
        tokens_run: tokens that went through the linear layers, padding included (but for the
            padding of CUDA graphs).
        padding_run: how many of them were padding.
        expected_length: how many tokens a row will hold, where all that is stored is needed no more
            when `active` ends; 0 where that is not so, or nobody knows.
        rounded: whether it drafts: its weights may then be rounded, see `install_packed_linears`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int,
        hidden_layers: Sequence[int] = (),
        virtual_tokens: VirtualTokens | None = None,
        batching: str = "unpadded",
        vocab_size: int | None = None,
    ):
        super().__init__(num_rows, BATCHING[batching])
        self.model = model
        self.forwards = 0
        self.tokens_run = 0
        self.padding_run = 0
        self.expected_length = 0
        self.rounded = False
        self._call = ModelCall(model, hidden_layers, vocab_size)
        self._virtual_tokens = virtual_tokens
        self._attention: PackedAttention | None = None
        self._graphs: StepGraphs | None = None
        config = model.config.get_text_config()
        self._cache = PoolCache(self.pool, num_layers(model))
        self._attending = num_attention_layers(config)
        self._mixers = RecurrentMixers(model, num_rows) if mixers_of(model) else None
        self._scales_by_place = scales_by_place(model)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        embedding: Any = self.model.get_input_embeddings()
        return execution_device(embedding)

    @property
    def graph_counts(self) -> tuple[int, int, str | None]:
        """Forwards that were replayed, graphs recorded, and why nothing can be recorded."""
        if self._graphs is None:
            return 0, 0, "its layers are not packed"
        return self._graphs.replays, self._graphs.captures, self._graphs.refusal

    @contextmanager
    def active(self) -> Iterator[ModelRunner]:
        """Prepare the model for tree forwards; it is as it was found when the block ends."""
        with ExitStack() as stack:
            stack.enter_context(self._call.active())
            if takes_packed(self.model):
                self._attention = PackedAttention(self.model)
                self._graphs = StepGraphs(
                    self.model, self.pool, self.device, self._graphs_key(), self.expected_length
                )
                stack.callback(self._graphs.close)
            self._linears = [
                stack.enter_context(install_packed_linears(part, self.rounded))
                for part in decoding_parts(self.model)
            ]
            self._layers = stack.enter_context(CompiledLayers.of(self.model).active(self.model))
            if self._virtual_tokens is not None:
                stack.enter_context(self._virtual_tokens.active(self.model))
            if self._mixers is not None:
                stack.enter_context(self._mixers.active())
            yield self

    def attend_to(self, states: Tensor, kept: DynamicCache | None = None) -> None:
        """Let a decoder attend to what an encoder made of the input; see `CrossAttention`."""
        self._call.cross_attention = CrossAttention(self.model, states, self._cache, kept)

    def prefill(
        self,
        inputs: Mapping[str, Any],
        frame_masks: Sequence[Tensor],
        position_offsets: Sequence[int],
    ) -> ForwardOutput:
        """Run a prompt as plain `generate()` does, in one forward of the model's own attention.

        Args:
            inputs: keyword arguments of the model, `input_ids` (B, T) among them.
            frame_masks: per row (L,) bool, True where the cache holds a token afterwards.
            position_offsets: see `RowStorage`.

        Returns:
            Logits of the last token of each row, hidden states of the B * T tokens.
        """
        num_rows, length = inputs["input_ids"].shape
        result = self._call.plainly(inputs)
        self.load(output_cache(result), frame_masks)
        self.position_offsets = list(position_offsets)
        ran = [
            (mask[-length:].nonzero()[:, 0] + row * length).tolist()
            for row, mask in enumerate(frame_masks)
        ]
        self.forwards += 1
        self.tokens_run += num_rows * length
        self.padding_run += num_rows * length - sum(map(len, ran))
        places = PackedInputs(nodes=[mine[-1] for mine in ran])
        output = self._output(result.logits[:, -1].contiguous(), self._call.hidden(result), places)
        output.pending = {row: mine[:-1] for row, mine in enumerate(ran)}
        return output

    def forward(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """Run the pending tokens of every row in the tree, and tree nodes.

        Args:
            tree: the draft tree; each row's root is the last token of its sequence.
            sequences: per row all committed tokens, without padding.
            nodes: which nodes to run, ascending; all of them by default. Their ancestors must be
                among them or have run since the last `keep`.

        Returns:
            Logits of the nodes, hidden states of everything that ran.
        """
        wanted = range(tree.num_nodes) if nodes is None else nodes
        self.begin_round(tree, sequences, wanted)
        earlier: list[ForwardOutput] = []
        while long := [
            w for w in self.plan(tree, sequences, wanted) if len(w.pending) > PREFILL_CHUNK
        ]:
            parts = [
                replace(w, pending=w.pending[:PREFILL_CHUNK], nodes=[], offsets=[], width=0)
                for w in long
            ]
            earlier.append(self._run(parts, tree))
        output = self._run(self.plan(tree, sequences, wanted), tree)
        for part_output in reversed(earlier):
            output.put_after(part_output)
        return output

    @property
    def supports_device_tokens(self) -> bool:
        """Return True if `forward_device_tokens` is supported: packed steps on a GPU."""
        device_draws = self.device.type in transfer.ASYNCHRONOUS and takes_packed(self.model)
        apart = self._mixers is not None or self._virtual_tokens is not None
        return device_draws and not apart and not self.batching.pads_inputs

    def forward_device_tokens(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int],
        given: DeviceTokens,
    ) -> ForwardOutput:
        """`forward` of nodes of a round under way, whose tokens only the device knows.

        Those of the tree are not looked at, nor its parents where what they see is given; then its
        depths alone count, and there must be no gaps in the storage.
        """
        return self._run(self.plan(tree, sequences, nodes), tree, given)

    def keep(self, paths: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Keep what is stored of each row's accepted path; see `RowStorage.keep`."""
        kept = super().keep(paths)
        if self._mixers is not None:
            with use_packed_linears(self.rounded):
                self._mixers.keep(kept)
        return kept

    def shorten(self, row: int, length: int) -> None:
        """Forget what is stored of `row` after `length` tokens; all of it if a state is too far."""
        if self._mixers is not None and self.stored[row] > length:
            self._mixers.restart(row)
            length = 0
        super().shorten(row, length)

    def load(self, cache: Cache, frame_masks: Sequence[Tensor]) -> None:
        """Start from the cache of an earlier call; see `RowStorage.load`."""
        super().load(expanded(self.model, cache), frame_masks)
        if self._mixers is not None:
            self._mixers.load(cache)

    def export(self, cache: DynamicCache, frame_masks: Sequence[Tensor]) -> None:
        """Write what is stored into a new cache of the model; see `RowStorage.export`."""
        super().export(cache, frame_masks)
        if self._mixers is not None:
            self._mixers.export(cache)

    def _run(
        self, work: list[RowWork], tree: DraftTree, given: DeviceTokens | None = None
    ) -> ForwardOutput:
        rows = work
        packed = self._attention
        if self.batching.pads_inputs and packed:
            rows = fill_up(work, self.idle({w.row for w in work}))
        # One place more than needed: the padding of the rectangular path goes there.
        self.pool.reserve(max(w.num_keys + w.fill for w in rows) + 1)
        self.forwards += 1
        for linears in self._linears:
            linears.refresh()
        self._layers.begin_step()
        before = self.tokens_run
        with use_packed_linears(self.rounded), packed.chosen() if packed else nullcontext():
            if packed:
                output = self._run_packed(rows, tree, given)
            else:
                output = self._run_rectangular(rows, tree)
        self.padding_run += self.tokens_run - before - sum(w.num_tokens for w in work)
        self.note(work)
        return output

    def _run_packed(
        self, work: list[RowWork], tree: DraftTree, given: DeviceTokens | None
    ) -> ForwardOutput:
        inputs = pack(work, tree)
        assert self._attention is not None, "forwards happen while active"
        assert self._graphs is not None, "forwards happen while active"
        step = PackedStep(self.pool, inputs.writes, inputs.segments, self._attention.traits)
        step.sees = None if given is None else given.sees
        # Padding passes the head too, as it does wherever inputs are padded.
        kept = torch.tensor([*inputs.nodes, *inputs.fill], dtype=torch.long)
        tokens = torch.tensor(inputs.tokens)
        tensors = [tokens if given is None else given.tokens, torch.tensor(inputs.positions), kept]
        if self._scales_by_place:
            tensors.append(torch.tensor(inputs.places(self.paddings)))
        self.tokens_run += len(tokens)
        with self._acting(tokens[None]) as acts, self._by_row(work, tree, inputs):
            if acts:
                # Python decides there what the layers compute.
                with uncompiled():
                    logits, *hidden = self._compute(self._graphs.put(tensors, step), step)
            else:
                logits, *hidden = self._graphs.run(self._compute, tensors, step)
        # After the results of a graph come those of its padding.
        hidden = [states[: len(tokens)] for states in hidden]
        return self._output(logits[: len(inputs.nodes)], hidden, inputs)

    def _compute(self, tensors: list[Tensor], step: PackedStep) -> list[Tensor]:
        """Logits of the tokens to keep and hidden states of all, from tensors on the device."""
        tokens, positions, kept, *places = tensors
        # A 4D mask of one element is passed through as it is: no model builds a mask of its own.
        mask = tokens.new_ones(1, 1, 1, 1, dtype=torch.bool)
        result = self._call(
            tokens[None],
            self._embedded(tokens[None]),
            positions[None],
            mask,
            kept,
            spec_step=step,
            use_cache=False,
            cache=TokenPlaces(places[0]) if places else None,
        )
        step.check(self.model, self._attending)
        self._layers.end_step(step.written)
        return [self._call.kept(result, kept), *self._call.hidden(result)]

    def _run_rectangular(self, work: list[RowWork], tree: DraftTree) -> ForwardOutput:
        """The same for models without the attention interface."""
        spare = self.pool.capacity - 1
        inputs = align_right(work, tree, self.pool.num_slots, spare)
        self._cache.place(inputs.places.to(self.device), inputs.visible.shape[2])
        mask = inputs.visible[:, None].to(self.device)
        if self.model.config._attn_implementation == "eager":
            additive = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device)
            mask = additive.masked_fill_(~mask, torch.finfo(self.model.dtype).min)
        last = max(1, *(len(w.nodes) for w in work))
        self.tokens_run += inputs.tokens.numel()
        tokens = inputs.tokens.to(self.device)
        with (
            tree_alibi(self.model, inputs.key_positions.to(self.device)),
            self._acting(inputs.tokens),
            self._by_row(work, tree, inputs),
        ):
            result = self._call(
                tokens,
                self._embedded(tokens),
                inputs.positions.to(self.device),
                mask,
                last,
                cache=self._cache,
                use_cache=True,
            )
        # The nodes of a row are its last columns, with or without `logits_to_keep`.
        lines = [result.logits[w.row, -len(w.nodes) :] for w in work if w.nodes]
        logits = torch.cat(lines) if lines else result.logits[0, :0]
        return self._output(logits, self._call.hidden(result), inputs)

    def _by_row(
        self, work: list[RowWork], tree: DraftTree, inputs: PackedInputs | RectangularInputs
    ) -> AbstractContextManager[None]:
        """Call recurrent mixers, if there are any, row by row in one forward."""
        if self._mixers is None:
            return nullcontext()
        return self._mixers.running(work, tree, inputs)

    def _embedded(self, tokens: Tensor) -> Tensor | None:
        """Embeddings of (B, T) tokens on the device, if some of them may be virtual."""
        virtual = self._virtual_tokens
        return None if virtual is None else virtual.embed(self.model, tokens)

    @contextmanager
    def _acting(self, tokens: Tensor) -> Iterator[bool]:
        """Whether layers act on virtual ones among (B, T) tokens on the host, for one forward."""
        virtual = self._virtual_tokens
        if virtual is None or not virtual.acts_on_layers or int(tokens.min()) >= 0:
            yield False
            return
        with virtual.acting(tokens):
            yield True

    def _graphs_key(self) -> Hashable:
        """By what later calls find the same steps; None where every call has its own."""
        # Encoder states and virtual tokens lie elsewhere in every call.
        apart = self._virtual_tokens is not None or self.model.config.is_encoder_decoder
        if apart or not self.expected_length:
            return None
        return self.pool.num_slots, self._call.hidden_layers, self._call.vocab_size

    def _output(
        self, logits: Tensor, states: Sequence[Tensor], inputs: PackedInputs | RectangularInputs
    ) -> ForwardOutput:
        hidden = dict(zip(self._call.hidden_layers, states, strict=True))
        pending = {row: list(places) for row, places in inputs.pending.items()}
        return ForwardOutput(self._call.fitted(logits), hidden, pending, inputs.nodes, self)

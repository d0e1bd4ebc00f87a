"""Runs one Hugging Face model on draft trees, with keys and values per row.

`ModelRunner` joins the parts of the engine: `forward/` packs trees and stores keys and values,
`models/` supplies what single architectures need, `fast/` accelerates the steps. The same class
runs the target and draft models. `forward` runs whatever is not stored yet (see `RowStorage`), so
the prompt, a reused cache, a draft model that has to catch up and a draft tree that grows level by
level use one mechanism. A short prompt shares its forward pass with the first draft and with the
drafts of the other rows; a long one runs before them, by the attention of prompts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_spec.backend.device import transfer
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import output_cache
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.fast.graph_shapes import step_variant
from hf_spec.engine.fast.greedy_head import GreedyHead
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.fast.torch_compile import original_forwards
from hf_spec.engine.forward.attention_span import STEP_TOKENS
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import PoolCache
from hf_spec.engine.forward.node_tokens import DeviceTokens, VirtualTokens
from hf_spec.engine.forward.output import ALL_LOGITS, ForwardOutput, Readout
from hf_spec.engine.forward.packing import (
    PackedInputs,
    PreparedPass,
    RectangularInputs,
    align_right,
)
from hf_spec.engine.forward.padded_batching import make_storage
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.forward.tree_attention import PackedAttention, takes_packed
from hf_spec.engine.model_call import ModelCall
from hf_spec.engine.models.cross_attention import CrossAttention, decoding_parts, num_layers
from hf_spec.engine.models.internal_positions import QueryPositions, scales_queries, tree_alibi
from hf_spec.engine.models.latent_kv import expanded
from hf_spec.engine.models.position_tables import num_positions
from hf_spec.engine.models.recurrent_layers import mixers_of, num_attention_layers
from hf_spec.engine.models.recurrent_state import RecurrentMixers

# A prompt runs in chunks of this many tokens per row, which bounds masks and activations.
PREFILL_CHUNK = 2048


class ModelRunner:
    """A model, the storage of its B rows, and the forward pass over draft trees.

    Args:
        model: a causal language model, or an encoder-decoder of which it runs the decoder.
        hidden_layers: indices into `hidden_states` that each forward pass returns, or
            `BEFORE_NORM`.
        virtual_tokens: meaning of nodes with negative token ids, if there are any.
        batching: what is padded, a key of `padded_batching.BATCHING`.
        vocab_size: V of the sequences and the logits, if the model's own differs by padding.

    Attributes:
        rows: committed tokens of each row, and their keys and values.
        forwards: number of forward passes so far.
        tokens_run: number of tokens that passed the linear layers, padding included (except the
            padding of CUDA graphs).
        padding_run: number of padding tokens among them.
        expected_length: number of tokens that a row will hold, if everything stored can be dropped
            when `active` ends; 0 if it is needed later, or the length is unknown.
        rounded: True for a model that drafts: its weights may be rounded, see
            `install_packed_linears`.
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
        self.model = model
        self.rows = make_storage(num_rows, batching)
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
        self._cache = PoolCache(self.rows.pool, num_layers(model))
        self._num_attention_layers = num_attention_layers(config)
        self._mixers = RecurrentMixers(model, num_rows) if mixers_of(model) else None
        self._num_positions = num_positions(model)
        self._scales_queries = scales_queries(model)
        self._head = GreedyHead(model)
        # True if the state of compiled layers was checked since the last `keep`.
        self._checked = False

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        embedding: Any = self.model.get_input_embeddings()
        return execution_device(embedding)

    @property
    def graph_counts(self) -> tuple[int, int, str | None]:
        """Forward passes replayed, graphs captured, and the reason why none can be captured."""
        if self._graphs is None:
            return 0, 0, "its layers are not packed"
        return self._graphs.replays, self._graphs.captures, self._graphs.refusal

    @contextmanager
    def active(self) -> Iterator[ModelRunner]:
        """Prepare the model for tree forwards; restore it when the block ends."""
        with ExitStack() as stack:
            stack.enter_context(original_forwards(self.model))
            stack.enter_context(self._call.active())
            if takes_packed(self.model):
                self._attention = PackedAttention(self.model)
            self._linears = [
                stack.enter_context(install_packed_linears(part, self.rounded))
                for part in decoding_parts(self.model)
            ]
            self._layers = stack.enter_context(CompiledLayers.of(self.model).active(self.model))
            if self._attention is not None:
                # After compiled layers are installed, which stored graphs were captured with.
                self._graphs = StepGraphs(
                    self.model,
                    self.rows.pool,
                    self.device,
                    self._graphs_key(),
                    self.expected_length,
                )
                stack.callback(self._graphs.close)
            if self._virtual_tokens is not None:
                stack.enter_context(self._virtual_tokens.active(self.model))
            if self._mixers is not None:
                stack.enter_context(self._mixers.active())
            yield self

    def attend_to(self, states: Tensor, cache: DynamicCache | None = None) -> None:
        """Let a decoder attend to the output of an encoder; see `CrossAttention`."""
        self._call.cross_attention = CrossAttention(self.model, states, self._cache, cache)

    def prefill(
        self,
        inputs: Mapping[str, Any],
        frame_masks: Sequence[Tensor],
        position_offsets: Sequence[int],
    ) -> ForwardOutput:
        """Run a prompt as plain `generate()` does, with the model's own attention.

        `inputs` are keyword arguments of the model, (B, T) `input_ids` among them; `frame_masks`
        are per row (L,) bool, True where the cache holds a token afterwards. The output has the
        logits of the last token of each row and the hidden states of the B * T tokens.
        """
        num_rows, length = inputs["input_ids"].shape
        result = self._call.prefill(inputs)
        self.load(output_cache(result), frame_masks)
        self.rows.position_offsets = list(position_offsets)
        by_row = [
            (mask[-length:].nonzero()[:, 0] + row * length).tolist()
            for row, mask in enumerate(frame_masks)
        ]
        self.forwards += 1
        self.tokens_run += num_rows * length
        self.padding_run += num_rows * length - sum(map(len, by_row))
        last = PackedInputs(nodes=[indices[-1] for indices in by_row])
        output = self._output(result.logits[:, -1].contiguous(), self._call.hidden(result), last)
        output.pending = {row: indices[:-1] for row, indices in enumerate(by_row)}
        return output

    def forward(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int] | None = None,
        readout: Readout = ALL_LOGITS,
    ) -> ForwardOutput:
        """Run the pending tokens of every row in the tree, and tree nodes.

        Args:
            tree: the draft tree; each row's root is the last token of its sequence.
            sequences: per row all committed tokens, without padding.
            nodes: nodes to run, ascending; all of them by default. Their ancestors must be among
                them or have run since the last `keep`.
            readout: what is read of the logits. Its function runs if the step may be captured.

        Returns:
            Logits of the nodes, hidden states of everything that ran.
        """
        wanted = range(tree.num_nodes) if nodes is None else nodes
        work, earlier = self._run_prompts(tree, sequences, wanted)
        output = self._run(work, tree, readout)
        for chunk_output in reversed(earlier):
            output.put_after(chunk_output)
        return output

    @property
    def supports_device_tokens(self) -> bool:
        """Return True if passes may have `DeviceTokens`: packed steps on a GPU."""
        device_draws = self.device.type in transfer.ASYNCHRONOUS and takes_packed(self.model)
        apart = self._mixers is not None or self._virtual_tokens is not None
        return device_draws and not apart and not self.rows.pads_inputs

    @property
    def step_graphs(self) -> StepGraphs:
        """CUDA graphs of the packed steps; only while active."""
        assert self._graphs is not None, "forwards happen while active"
        return self._graphs

    def prepare(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int],
        num_bytes: int | None = None,
    ) -> PreparedPass:
        """Prepare a packed pass, like `forward`, and count it as run; `run_prepared` runs it.

        Several may be prepared before the first of them runs. Long prompts run here. If `num_bytes`
        is given, the device computes that many bytes of `DeviceTokens.sees` per node. The parents
        of the tree are then ignored, only its depths count, and the storage must have no gaps (see
        `padded_batching`).
        """
        assert self._attention is not None, "forwards happen while active"
        work, _ = self._run_prompts(tree, sequences, nodes)
        self.rows.pool.reserve(max(w.num_keys for w in work) + 1)
        self.forwards += 1
        prepared = self._prepare(self._attention, work, tree)
        if num_bytes is not None:
            count = len(prepared.inputs.tokens)
            prepared.step.sees = torch.empty(count, num_bytes, dtype=torch.uint8)
        self.rows.mark_ran(work)
        return prepared

    def run_prepared(
        self, prepared: PreparedPass, device_tokens: DeviceTokens | None = None
    ) -> ForwardOutput:
        """Run a prepared pass; with `device_tokens`, the token ids of its tree are ignored."""
        assert self._attention is not None, "forwards happen while active"
        self._begin_pass()
        with use_packed_linears(self.rounded, prepared.has_prompt), self._attention.active():
            return self._run_packed(prepared, device_tokens)

    def limit_depths(
        self, limits: Mapping[int, int], sequences: Sequence[Sequence[int]], unrun: int = 0
    ) -> Mapping[int, int]:
        """Reduce maximum depths of drafts so that no node is past the model's last position.

        `sequences` are those of `forward`. The `unrun` last levels of a draft need no positions. A
        row gets depth 0 if its root has none.
        """
        if self._num_positions is None:
            return limits
        ends = [self._num_positions - offset for offset in self.rows.position_offsets]
        return {
            row: max(0, min(limit, ends[row] - len(sequences[row]) + unrun))
            for row, limit in limits.items()
        }

    def keep(self, paths: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Commit each row's accepted path; see `RowStorage.keep`."""
        self._checked = False
        committed = self.rows.keep(paths)
        if self._mixers is not None:
            with use_packed_linears(self.rounded):
                self._mixers.keep(committed)
        return committed

    def restart(self, row: int) -> None:
        """Drop everything stored of `row`, for a new sequence."""
        self.shorten(row, 0)
        self.rows.restart(row)

    def shorten(self, row: int, length: int) -> None:
        """Drop what is stored of `row` after `length` tokens; all of it if a state is past them."""
        if self._mixers is not None and self.rows.stored[row] > length:
            self._mixers.restart(row)
            length = 0
        self.rows.shorten(row, length)

    def load(self, cache: Cache, frame_masks: Sequence[Tensor]) -> None:
        """Start from the cache of an earlier call; see `RowStorage.load`."""
        self.rows.load(expanded(self.model, cache), frame_masks)
        if self._mixers is not None:
            self._mixers.load(cache)

    def export(self, cache: DynamicCache, frame_masks: Sequence[Tensor]) -> None:
        """Write what is stored into a new cache of the model; see `RowStorage.export`."""
        self.rows.export(cache, frame_masks)
        if self._mixers is not None:
            self._mixers.export(cache)

    def _run_prompts(
        self, tree: DraftTree, sequences: Sequence[Sequence[int]], nodes: Sequence[int]
    ) -> tuple[list[RowWork], list[ForwardOutput]]:
        """Run long prompts in chunks; return what is left to run, and the outputs of the chunks."""
        work = self.rows.plan(tree, sequences, nodes)
        earlier: list[ForwardOutput] = []
        longest = STEP_TOKENS if self._attention else PREFILL_CHUNK
        while long := [w for w in work if len(w.pending) > longest]:
            chunks = [
                replace(w, pending=w.pending[:PREFILL_CHUNK], nodes=[], offsets=[], width=0)
                for w in long
            ]
            earlier.append(self._run(chunks, tree))
            work = self.rows.plan(tree, sequences, nodes)
        return work, earlier

    def _begin_pass(self) -> None:
        for linears in self._linears:
            linears.refresh()
        self._layers.begin_step()

    def _run(
        self, work: list[RowWork], tree: DraftTree, readout: Readout = ALL_LOGITS
    ) -> ForwardOutput:
        packed = self._attention
        # Logits of virtual tokens are the next draft.
        best_only = readout.best_only and self._virtual_tokens is None
        # One entry more than needed: the padding of the rectangular path is stored there.
        self.rows.pool.reserve(max(w.num_keys for w in work) + 1)
        self.forwards += 1
        self._begin_pass()
        before = self.tokens_run
        prompt = any(w.stored == 0 for w in work)
        with use_packed_linears(self.rounded, prompt, self._head if best_only else None):
            if packed:
                with packed.active():
                    output = self._run_packed(self._prepare(packed, work, tree), readout=readout)
            else:
                run = partial(self._run_rectangular, work, tree)
                # A failed pass may have changed recurrent states.
                output = self.rows.pool.retried(run) if self._mixers is None else run()
        if best_only:
            self._head.confirm(output.logits)
        self.padding_run += self.tokens_run - before - sum(w.num_tokens for w in work)
        self.rows.mark_ran(work)
        return output

    def _prepare(
        self, attention: PackedAttention, work: list[RowWork], tree: DraftTree
    ) -> PreparedPass:
        inputs = self.rows.pack(work, tree)
        step = PackedStep(self.rows.pool, inputs.segments, attention.traits)
        count, heads = len(inputs.tokens), [*inputs.nodes, *inputs.head_padding]
        # One tensor is split, since creating small tensors is slow.
        numbers = torch.tensor([*inputs.tokens, *inputs.positions, *heads])
        tensors = [*numbers.split([count, count, len(heads)])]
        if self._scales_queries:
            tensors.append(torch.tensor(inputs.frame_positions(self.rows.paddings)))
        self.tokens_run += count
        return PreparedPass(step, tensors, work, tree, inputs)

    def _run_packed(
        self,
        prepared: PreparedPass,
        device_tokens: DeviceTokens | None = None,
        readout: Readout = ALL_LOGITS,
    ) -> ForwardOutput:
        inputs, step, tensors = prepared.inputs, prepared.step, list(prepared.tensors)
        acting, graphs = self._acting(tensors[0][None]), self.step_graphs
        if device_tokens is not None:
            tensors[0], step.sees = device_tokens.tokens, device_tokens.sees
        result: Tensor | None = None
        with self._by_row(prepared.work, prepared.tree, inputs):
            if acting is None and readout.compute is not None and graphs.refusal is None:
                compute = partial(self._compute_and_read, readout)
                with step_variant(readout.compute):
                    outputs = graphs.run(compute, [*tensors, *readout.tensors], step)
                result, logits, *hidden = outputs
            elif acting is None:
                logits, *hidden = graphs.run(self._compute, tensors, step)
            else:
                # Hooks inside the layers differ from step to step, which graphs do not support.
                with acting as gate:
                    *tensors, step.gate = graphs.put([*tensors, gate], step)
                    logits, *hidden = self._compute(tensors, step)
        # The results of a graph end with those of its padding.
        hidden = [states[: len(inputs.tokens)] for states in hidden]
        output = self._output(logits[: len(inputs.nodes)], hidden, inputs)
        output.result = result
        return output

    def _compute_and_read(
        self, readout: Readout, tensors: list[Tensor], step: PackedStep
    ) -> list[Tensor]:
        """Compute the result of a readout, whose inputs come last, then what `_compute` does."""
        assert readout.compute is not None
        count = len(tensors) - len(readout.tensors)
        logits, *hidden = self._compute(tensors[:count], step)
        result = readout.compute(self._call.fit_vocabulary(logits), tensors[count:])
        return [result, logits, *hidden]

    def _compute(self, tensors: list[Tensor], step: PackedStep) -> list[Tensor]:
        """Compute logits of the head's tokens and hidden states of all, from device tensors."""
        # A draft model checks once per draft: its output need not be exact.
        if not (self.rounded and self._checked):
            self._layers.refresh()
            self._checked = True
        tokens, positions, head_tokens, *frame_positions = tensors
        tokens = tokens[None]
        # A 4D mask of one element is passed through unchanged: no model builds a mask of its own.
        mask = tokens.new_ones(1, 1, 1, 1, dtype=torch.bool)
        result = self._call(
            tokens,
            self._embedded(tokens),
            positions[None],
            mask,
            head_tokens,
            spec_step=step,
            use_cache=False,
            cache=QueryPositions(frame_positions[0]) if frame_positions else None,
        )
        step.check(self.model, self._num_attention_layers)
        self._layers.end_step(step.written)
        return [self._call.logits_of(result, head_tokens), *self._call.hidden(result)]

    def _run_rectangular(self, work: list[RowWork], tree: DraftTree) -> ForwardOutput:
        """Run one forward pass of a model without the attention interface."""
        pool = self.rows.pool
        inputs = align_right(work, tree, pool.num_slots, pool.capacity - 1)
        self._cache.place(inputs.cache_indices.to(self.device), inputs.visible.shape[2])
        mask = inputs.visible[:, None].to(self.device)
        if self.model.config._attn_implementation == "eager":
            additive = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device)
            mask = additive.masked_fill_(~mask, torch.finfo(self.model.dtype).min)
        last = max(1, *(len(w.nodes) for w in work))
        tokens = inputs.tokens.to(self.device)
        with (
            tree_alibi(self.model, inputs.key_positions.to(self.device)),
            self._acting(inputs.tokens) or nullcontext(),
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
        self.tokens_run += tokens.numel()
        # The nodes of a row are its last columns, with or without `logits_to_keep`.
        lines = [result.logits[w.row, -len(w.nodes) :] for w in work if w.nodes]
        logits = torch.cat(lines) if lines else result.logits[0, :0]
        return self._output(logits, self._call.hidden(result), inputs)

    def _by_row(
        self, work: list[RowWork], tree: DraftTree, inputs: PackedInputs | RectangularInputs
    ) -> AbstractContextManager[None]:
        """Call recurrent mixers, if there are any, row by row in one forward pass."""
        if self._mixers is None:
            return nullcontext()
        return self._mixers.running(work, tree, inputs)

    def _embedded(self, tokens: Tensor) -> Tensor | None:
        """Return embeddings of (B, T) tokens on the device if some of them may be virtual."""
        virtual = self._virtual_tokens
        return None if virtual is None else virtual.embed(self.model, tokens)

    def _acting(self, tokens: Tensor) -> AbstractContextManager[Tensor] | None:
        """Return the context in which layers treat virtual ones of (B, T) host tokens differently.

        None if layers do not act on any of them.
        """
        virtual = self._virtual_tokens
        if virtual is None or not virtual.acts_on_layers or int(tokens.min()) >= 0:
            return None
        return virtual.acting(tokens)

    def _graphs_key(self) -> Hashable:
        """Return the key under which later calls find the graphs; None to keep none."""
        # Encoder states and virtual tokens have other addresses in every call.
        apart = self._virtual_tokens is not None or self.model.config.is_encoder_decoder
        if apart or not self.expected_length:
            return None
        return self.rows.pool.num_slots, self._call.hidden_layers, self._call.vocab_size

    def _output(
        self, logits: Tensor, states: Sequence[Tensor], inputs: PackedInputs | RectangularInputs
    ) -> ForwardOutput:
        hidden = dict(zip(self._call.hidden_layers, states, strict=True))
        pending = {row: list(indices) for row, indices in inputs.pending.items()}
        logits = self._call.fit_vocabulary(logits)
        return ForwardOutput(logits, hidden, pending, inputs.nodes, self.rows)

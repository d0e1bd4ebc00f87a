"""The Falcon head: predicts k tokens at once from the target's last features.

A *pair* i is the target's feature h_i (its last hidden state, after the final norm) and the token
t_{i+1} that follows it. Two LSTM layers mix the halves of a pair, a few layers of the target's
architecture attend over the pairs, and output i predicts the feature h_{i+k}, from which the
target's output head predicts token t_{i+k+1}. So the last k pairs of a text predict the next k
tokens in one pass (Gao et al. 2024, arXiv 2412.12639, section 3.1 and equation 1). With k = 1 this
is EAGLE's head.

Pairs see all pairs of their block of k, and of every earlier block (the paper's relaxed causal
mask, `block_mask`). No output sees its own answer, which is k pairs later, in the next block. The
blocks may begin anywhere, as long as the newest pairs fill one. Training draws where they begin, so
a head works for every alignment of a generation.

A *fused* head, ours, adds a learned projection of three earlier hidden states to the feature, like
EAGLE-3 (Li et al. 2025, arXiv 2503.01840). Nothing is added to features that it predicts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import AdapterMethod, BaseModel, register_method
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.adapters.reading import VOCABULARY, check_tensors, read_vocabulary
from hf_spec.common.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.engine.models.recurrent_layers import mixers_of
from hf_spec.methods.draft_model.truncated import last_layers
from hf_spec.methods.falcon.settings import FalconShape
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead, PairHead, State

METHOD = "falcon"
# Prefix of the weights for earlier hidden states.
EARLIER = "earlier."


class FalconHead(PairHead):
    """Predicts the next k features of a target.

    The target is not changed; `attention` has copies of its layers, and `head` shares its frozen
    output head. `vocabulary`, (R,) int64, are the tokens that it can draft; None for all.

    Attributes:
        options: options of its adapter: `tree`, `max_depth`, ...
        enter, leave: (2H,) and (H,), scales of the LSTM's inputs and outputs; not in the paper.
    """

    # The strategy that `assistant=` selects by default.
    strategy = METHOD

    def __init__(self, target: PreTrainedModel, shape: FalconShape, vocabulary: Tensor | None):
        super().__init__()
        config: Any = target.config.get_text_config()
        depth = config.num_hidden_layers
        if shape.num_layers > depth:
            raise OptionError(
                f"num_layers={shape.num_layers}: {type(target).__name__} has only {depth} layers"
            )
        if mixers_of(target):
            raise UnsupportedError(
                f"{type(target).__name__} has recurrent layers, and those of a Falcon head attend; "
                "use spec_strategy='draft' or 'tree'"
            )
        aux = default_aux_layers(depth) if shape.fused else ()
        if any(not 0 <= layer < depth for layer in aux):
            raise OptionError(
                f"fused={shape.fused}: the {depth} layers of {type(target).__name__} are too few "
                "to read some before the last; leave it out"
            )
        self.hidden_layers: tuple[int, ...] = (*aux, -1)
        self.shape = shape
        self.options: dict[str, Any] = {}
        self.hidden_size: int = config.hidden_size
        self.base = BaseModel.of(target)
        stack = last_layers(target, shape.num_layers, shape.mlp_size)
        _renumber(stack, depth - shape.num_layers)
        self.attention: Any = stack
        self.head = FewTokensHead(target.get_output_embeddings(), vocabulary)
        mixer: Any = _RecurrentMixer if shape.recurrent else _PairMixer
        like: Any = {"device": target.device, "dtype": target.dtype}
        self.mixer = mixer(self.hidden_size, shape.dropout).to(**like)
        self.enter = nn.Parameter(torch.ones(2 * self.hidden_size, **like))
        self.leave = nn.Parameter(torch.ones(self.hidden_size, **like))
        self.earlier = _EarlierStates(len(aux), self.hidden_size).to(**like) if aux else None
        self.requires_grad_(False)
        for parameter in self.trained().values():
            parameter.requires_grad_(True)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained weights: all but embedding and output head."""
        embedding = self.attention.get_input_embeddings()
        frozen = {id(p) for module in (embedding, self.head) for p in module.parameters()}
        return {n: p for n, p in self.named_parameters() if id(p) not in frozen}

    @torch.no_grad()
    def start_plain(self, feature_size: Tensor | float, residual_size: float = 1.0) -> None:
        """Initialize the mixer to add token embedding and feature, at scales that suit the layers.

        These are root mean squares: of the target's features, (H,) or a scalar, and of the input of
        its copied layers.
        """
        # LSTM inputs should be about one, and its outputs are less than one; the copied attention
        # layers expect the residual stream. A few dimensions of a feature are many times larger
        # than the others and would dominate.
        table = self.attention.get_input_embeddings().weight.detach().float()
        sizes = torch.as_tensor(feature_size, dtype=torch.float32, device=table.device)
        sizes = sizes.expand(self.hidden_size)
        self.enter[: self.hidden_size] = 1 / table.square().mean().sqrt()
        self.enter[self.hidden_size :] = 1 / sizes
        self.leave.copy_(sizes * residual_size / sizes.square().mean().sqrt())
        self.mixer.start_plain()

    @torch.no_grad()
    def start_fusing(self, sizes: Tensor) -> None:
        """Initialize fusing from (n * H,) root mean squares of the n states it reads."""
        if self.earlier is not None:
            *_, last = parts = sizes.float().split(self.hidden_size)
            self.earlier.enter.copy_(1 / torch.cat(parts[:-1]))
            self.earlier.leave.copy_(last)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Return (..., H) features of the (..., H) hidden states of `hidden_layers`."""
        *earlier, last = states
        if self.earlier is None:
            return last
        weight = self.earlier.up.weight
        joined = torch.cat([state.to(weight.device, weight.dtype) for state in earlier], dim=-1)
        return last.to(weight.device) + self.earlier(joined).to(last.dtype)

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Run the LSTM over (S, L) pairs that follow `state`; return (S, L, H) mixed pairs."""
        embedded = self.attention.get_input_embeddings()(tokens)
        pairs = torch.cat([embedded, features.to(embedded.dtype)], dim=-1)
        mixed, state = self.mixer(pairs * self.enter, state)
        return mixed * self.leave, state

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """See `PairHead`."""
        return self.attention(inputs_embeds=mixed, use_cache=False, **attention)[0]

    def forward(self, tokens: Tensor, features: Tensor, grid: int = 0) -> Tensor:
        """Predict the features of whole texts, padded on the right, in training.

        From (B, T) int64 t_{i+1} and (B, T, H) h_i, position i of (B, T, H) has the predicted
        h_{i+k}. A block begins at `grid`, below k.
        """
        mixed, _ = self.mix(tokens, features)
        length = tokens.shape[1]
        visible = block_mask(length, self.shape.block_size, grid).to(tokens.device)
        positions = torch.arange(length, device=tokens.device)[None]
        masks = self._masks(visible, mixed.dtype)
        return self.attend(mixed, attention_mask=masks, position_ids=positions)

    def _masks(self, visible: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Return the mask as the layers take it, restricted to their sliding windows."""
        config: Any = self.attention.config.get_text_config()

        def form(mask: Tensor) -> Tensor:
            if config._attn_implementation == "eager":
                lowest = torch.finfo(dtype).min
                return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)[None, None]
            return mask[None, None]

        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
        if window is None or kinds == {"full_attention"}:
            return form(visible)
        position = torch.arange(len(visible), device=visible.device)
        near = form(visible & (position > position[:, None] - window))
        both = {"full_attention": form(visible), "sliding_attention": near}
        return near if len(kinds) == 1 else both

    def to_adapter(self, options: dict[str, Any]) -> SpecAdapter:
        """Return the trained weights in bfloat16, with the shape added to `options`."""
        tensors = {name: p.detach().to(torch.bfloat16) for name, p in self.trained().items()}
        if self.head.vocabulary is not None:
            tensors[VOCABULARY] = self.head.vocabulary.int()
        return SpecAdapter(METHOD, self.base, {"shape": asdict(self.shape), **options}, tensors)

    @classmethod
    def from_adapter(
        cls,
        adapter: SpecAdapter,
        target: PreTrainedModel,
        vocabulary: Tensor | Literal["stored"] | None = "stored",
        fused: bool = False,
    ) -> FalconHead:
        """Return the head of an adapter, in the dtype and on the device of `target`.

        `vocabulary` replaces that of the adapter. `fused` adds untrained weights for earlier states
        to a head without them. An adapter of another base, or a damaged one, raises
        `AssistantError`.
        """
        adapter.base.check(target)
        try:
            shape = FalconShape(**adapter.options["shape"])
        except (KeyError, TypeError, OptionError) as error:
            raise AssistantError(f"the Falcon adapter's shape cannot be used: {error}") from error
        what, tensors = "the Falcon adapter", dict(adapter.tensors)
        stored = read_vocabulary(what, tensors, adapter.base.vocab_size)
        tensors.pop(VOCABULARY, None)
        fuses_anew = fused and not shape.fused
        shape = replace(shape, fused=shape.fused or fused)
        head = cls(target, shape, stored if isinstance(vocabulary, str) else vocabulary)
        head.options = adapter.options
        trained = head.trained()
        if fuses_anew:
            trained = {n: p for n, p in trained.items() if not n.startswith(EARLIER)}
        check_tensors(what, tensors, {name: p.shape for name, p in trained.items()})
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(tensors[name])
        return head.requires_grad_(False).eval()


class _PairMixer(nn.Module):
    """Two LSTM layers that start from a zero state at every pair.

    Recurrent weights and forget gate have no effect on a zero state, so they are left out.
    """

    def __init__(self, size: int, dropout: float):
        super().__init__()
        # Rows of the gates in this order: input, cell, output.
        self.gates = nn.ModuleList([nn.Linear(width, 3 * size) for width in (2 * size, size)])
        self.dropout = dropout

    def forward(self, pairs: Tensor, state: State | None = None) -> tuple[Tensor, None]:
        hidden = pairs
        for index, gates in enumerate(self.gates):
            if index:
                hidden = F.dropout(hidden, self.dropout, self.training)
            enter, cell, leave = gates(hidden).chunk(3, dim=-1)
            hidden = leave.sigmoid() * (enter.sigmoid() * cell.tanh()).tanh()
        return hidden, None

    @torch.no_grad()
    def start_plain(self) -> None:
        for layer, num_inputs in enumerate((2, 1)):
            gates: Any = self.gates[layer]
            _open_gates(gates.weight, gates.bias, num_inputs, cell=1)


class _RecurrentMixer(nn.Module):
    """Two LSTM layers that carry their state along the text."""

    def __init__(self, size: int, dropout: float):
        super().__init__()
        self.lstm = nn.LSTM(2 * size, size, num_layers=2, batch_first=True, dropout=dropout)

    def forward(self, pairs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return self.lstm(pairs, state)

    @torch.no_grad()
    def start_plain(self) -> None:
        for layer, num_inputs in enumerate((2, 1)):
            weights: Any = self.lstm.all_weights[layer]
            weight, carried, bias, other = weights
            _open_gates(weight, bias, num_inputs, cell=2)
            carried.mul_(0.1)
            other.zero_()
            # The forget gate is the second: earlier pairs fade.
            bias.view(4, -1)[1].fill_(-2.0)


class _EarlierStates(nn.Module):
    """Low-rank projection of (..., n * H) earlier states, which is added to a feature.

    Attributes:
        enter, leave: (n * H,) and (H,), scales from states to about one, and on to features.
    """

    def __init__(self, count: int, size: int):
        super().__init__()
        self.enter = nn.Parameter(torch.ones(count * size))
        self.down = nn.Linear(count * size, max(1, size // 3), bias=False)
        self.up = nn.Linear(max(1, size // 3), size, bias=False)
        self.leave = nn.Parameter(torch.ones(size))
        # Adds nothing before training.
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        return self.up(self.down(states * self.enter)) * self.leave


def _open_gates(weight: Tensor, bias: Tensor, num_inputs: int, cell: int) -> None:
    """Initialize an LSTM layer to return the mean of its inputs, its other gates nearly open."""
    size = weight.shape[1] // num_inputs
    weight.mul_(0.1)
    plain = torch.eye(size).repeat(1, num_inputs) / num_inputs
    weight.view(-1, size, weight.shape[1])[cell] += plain.to(weight)
    bias.fill_(2.0)
    bias.view(-1, size)[cell].zero_()


def _renumber(stack: PreTrainedModel, first: int) -> None:
    """Number the layers from 0, also in the configs that the copied layers hold."""
    depth = stack.config.get_text_config().num_hidden_layers
    for module in stack.modules():
        layer: Any = module
        if hasattr(layer, "layer_idx"):
            layer.layer_idx -= first
        config = getattr(layer, "config", None)
        kinds = getattr(config, "layer_types", None)
        if config is not None and kinds is not None and len(kinds) > depth:
            config.layer_types = kinds[first:]


def block_mask(length: int, block_size: int, grid: int = 0) -> Tensor:
    """Return the (T, T) bool relaxed causal mask: pair i sees its own block and earlier ones.

    A block begins at `grid`, below k; the pairs before it form a block, too.
    """
    block = torch.arange(length).sub(grid).div(block_size, rounding_mode="floor")
    return block[:, None] >= block[None, :]


register_method(AdapterMethod(METHOD, "falcon", "A Falcon head for {}", FalconHead.from_adapter))

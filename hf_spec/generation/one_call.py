"""One speculative generation, from the inputs that `generate()` prepared to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel

from hf_spec.backend.device.distributed_checks import check_ranks
from hf_spec.common.compat import CACHE_NAME, find_cache
from hf_spec.common.outputs import SpecEncoderDecoderOutput, SpecGenerateOutput, publish_stats
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import check_processors
from hf_spec.engine.decode.loop import speculative_decode, update_counts
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.fast.compiled_layers import compiling
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.models.internal_positions import padding_of
from hf_spec.engine.models.latent_kv import caches_latents
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation import own_prefill
from hf_spec.generation.call_checks import check_inputs, check_padding, check_streamer
from hf_spec.generation.encoder_input import decoder_kwargs, share_encoder_output
from hf_spec.generation.own_prefill import Prompt


def generate_with(  # noqa: PLR0913 - the signature that generate() calls
    drafter: Drafter,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    streamer: Any = None,
    batching: str = "unpadded",
    read: Callable[..., Prompt] | None = None,
    **model_kwargs: Any,
) -> SpecGenerateOutput | SpecEncoderDecoderOutput | Tensor:
    """Decode speculatively; `generate()` calls this instead of its own decoding loop.

    Processors, criteria, settings and `model_kwargs` are those that `generate()` prepared. Several
    rows need a `BatchStreamer`. `batching` is a key of `BATCHING`. `read` returns the prompt of a
    draft model with images or an encoder, from that model and the target's prompt.

    Returns:
        (B, L + new) int64 ids, or an output object with `return_dict_in_generate`.
    """
    prompt_kwargs = decoder_kwargs(model, model_kwargs)
    attention_mask = prompt_kwargs.get("attention_mask")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    num_rows = input_ids.shape[0]
    stop = StopRules(stopping_criteria, num_rows)
    check_inputs(model, input_ids, attention_mask, prompt_kwargs, stop.max_length)
    prefills = own_prefill.is_needed(model, attention_mask, prompt_kwargs)
    prefills = prefills or own_prefill.shares_outliers(model)
    check_processors(logits_processor, num_rows)
    check_streamer(streamer, num_rows)
    check_ranks(model, input_ids, bool(generation_config.do_sample))
    state = _new_state(
        input_ids, attention_mask, stop, logits_processor, generation_config, streamer
    )
    target = ModelRunner(model, num_rows, drafter.hidden_layers, drafter.virtual_tokens, batching)
    target.expected_length = state.expected_length
    target.rows.paddings = (~state.prompt_mask).sum(dim=1).tolist()
    target.rows.position_offsets = padding_of(model, attention_mask)
    cache = find_cache(model_kwargs)
    prompt = Prompt(input_ids, attention_mask, model_kwargs, read)
    if cache is not None and (stored := prompt.stored) and not prefills:
        target.load(cache, [mask[:stored] for mask in state.prompt_mask])
    as_dict = bool(generation_config.return_dict_in_generate)
    wants_cache = cache is not None and (as_dict or getattr(cache, "_is_user_defined", False))
    wants_cache &= not caches_latents(model)
    with compiling(drafter.compile), target.active(), drafter.active(state):
        if model.config.is_encoder_decoder:
            share_encoder_output(target, drafter, prompt)
        verifier = drafter.make_verifier(logits_processor, num_rows)
        if prefills:
            own_prefill.first_round(prompt, target, drafter, verifier, state)
        output = speculative_decode(target, drafter, verifier, state)
        if wants_cache:
            _fill_cache(target, state)
            update_counts(state.stats, target, drafter)
            # While active: afterwards another call may use the pool.
            output[CACHE_NAME] = _export(target, state, cache)
    publish_stats(state.stats)
    if as_dict and model.config.is_encoder_decoder:
        return SpecEncoderDecoderOutput.of(output)
    return output if as_dict else output.sequences


def _new_state(
    input_ids: Tensor,
    attention_mask: Tensor,
    stop: StopRules,
    processors: Sequence[Any],
    config: GenerationConfig,
    streamer: Any,
) -> GenerationState:
    """Return the state of a generation before its first round."""
    pad = getattr(config, "_pad_token_tensor", None)
    check_padding(pad, stop.pads)
    as_dict = bool(config.return_dict_in_generate)
    return GenerationState.create(
        input_ids.long(),
        attention_mask.to(input_ids.device),
        stop,
        processors=processors,
        do_sample=bool(config.do_sample),
        pad_token_id=0 if pad is None else int(pad),
        streamer=streamer,
        keep_scores=as_dict and bool(config.output_scores),
        keep_logits=as_dict and bool(config.output_logits),
        expected_length=stop.max_length or 0,
    )


def _export(target: ModelRunner, state: GenerationState, cache: Any) -> Cache:
    """Write keys and values into the user's cache object, as plain `generate()` does."""
    fresh = DynamicCache(config=target.model.config)
    target.export(fresh, state.output_masks(state.prompt_length + max(state.generated) - 1))
    self_cache = getattr(cache, "self_attention_cache", cache)
    self_cache.layers = fresh.layers
    if self_cache is cache:
        return cache
    # The flags of a new object mark the cross attention as cached.
    return EncoderDecoderCache(self_cache, cache.cross_attention_cache)


def _fill_cache(target: ModelRunner, state: GenerationState) -> None:
    """Run rows that ended early on their last token and padding, as plain `generate()` does.

    A later call may reuse the cache and attend to either.
    """
    longest = max(state.generated)
    rows: list[tuple[list[int], list[int]]] = []
    texts = []
    for row, tokens in enumerate(state.tokens):
        # As in plain generate(), the last token of the longest row has no keys and values yet.
        text = [*tokens, *[state.pad_token_id] * (longest - state.generated[row])][:-1]
        target.shorten(row, min(len(tokens), len(text)))
        rows.append(([text[-1]], [-1]) if target.rows.stored[row] < len(text) else ([], []))
        texts.append(text)
    tree = DraftTree.from_rows(rows)
    if tree.num_nodes:
        target.forward(tree, texts)
        target.keep([[] for _ in rows])

"""`model.generate_batch(prompts, spec_strategy=...)`: any number of prompts, a few at a time.

Sequences follow each other in the rows of one batch (`hf_spec.engine.decode.continuous_batching`).
Arguments, request ids and outputs have the names that they have in transformers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_spec.backend.device.distributed_checks import check_ranks
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import CACHE_NAMES
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.common.outputs import SpecBatchOutput, SpecRequestOutput, SpecStats, publish_stats
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.continuous_batching import ContinuousBatch, Prepared, Request
from hf_spec.engine.decode.logits_processors import check_processors
from hf_spec.engine.decode.stopping import StopRules, for_one_sequence
from hf_spec.engine.decode.streaming import BatchStreamer
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.generation import own_prefill
from hf_spec.generation.call_checks import Settings, check_batch_streamer, check_inputs
from hf_spec.generation.call_setup import (
    resolve_call,
    stop_strings_to_criteria,
    without_static_cache,
)

# Default number of sequences at a time.
MAX_BATCH = 8

# Arguments of generate() or of transformers' generate_batch() that are unsupported here, and why.
UNSUPPORTED_ARGUMENTS = {
    "continuous_batching_config": "set the number of sequences at a time with max_batch=",
    "persistent_manager": "nothing is kept between calls",
    "record_timestamps": "a BatchStreamer receives tokens as soon as they are generated",
    "input_ids": "pass the prompts as the first argument",
    "attention_mask": "pass prompts without padding",
    "position_ids": "tokens have the positions 0, 1, 2, ... in their prompt",
    **dict.fromkeys(CACHE_NAMES, "every prompt is run from its first token"),
    "return_dict_in_generate": "the outputs are objects in any case",
    "output_scores": "generate() returns scores",
    "output_logits": "generate() returns logits",
}


@dataclass(frozen=True)
class GenerateBatchCall:
    """A checked call of `generate_batch()`.

    Attributes:
        max_batch: maximum number of sequences at a time.
        allowed: `prefix_allowed_tokens_fn`, which is called with the number of the prompt.
        arguments: the other arguments, for `generate()`.
    """

    config: StrategyConfig
    requests: list[Request]
    max_batch: int
    streamer: BatchStreamer | None
    allowed: Any
    arguments: dict[str, Any]


def resolve_batch_call(
    model: PreTrainedModel, strategy: Any, arguments: dict[str, Any]
) -> GenerateBatchCall:
    """Return the call after checking its strategy, its arguments and the target."""
    config, settings = resolve_call(model, strategy, arguments)
    arguments = dict(without_static_cache(settings, arguments))
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"generate_batch() takes token ids, but {type(model).__name__} also needs the "
            "input of an encoder; use generate(), which takes batches too"
        )
    for name, reason in UNSUPPORTED_ARGUMENTS.items():
        if (value := arguments.pop(name, None)) is not None and value is not False:
            raise UnsupportedError(
                f"{name}= cannot be combined with spec_strategy in generate_batch(): {reason}"
            )
    if BATCHING[config.batching].pads_kv:
        raise OptionError(
            f"batching={config.batching!r} aligns the KV cache of all rows, but rows begin at "
            "different times here; use 'unpadded' or 'unpadded_kv'"
        )
    max_batch = arguments.pop("max_batch", None)
    max_batch = MAX_BATCH if max_batch is None else max_batch
    if not isinstance(max_batch, int) or isinstance(max_batch, bool) or max_batch < 1:
        raise OptionError(f"max_batch={max_batch!r} must be a whole number of at least 1")
    streamer = arguments.pop("streamer", None)
    check_batch_streamer(streamer)
    prompts = read_prompts(arguments.pop("inputs", None), num_embeddings(model))
    requests = _requests(prompts, _num_sequences(settings))
    if settings["pad_token_id"] is None:
        # Unused, as rows are not padded, but without it generate() would warn for every prompt.
        arguments["pad_token_id"] = 0
    # Only transformers' own method has compiled code to warm up.
    arguments.pop("warmup", None)
    allowed = arguments.pop("prefix_allowed_tokens_fn", None)
    arguments["num_return_sequences"] = 1
    arguments = stop_strings_to_criteria(settings["stop_strings"], arguments)
    return GenerateBatchCall(config, requests, max_batch, streamer, allowed, arguments)


def prepare_request(
    generate: Callable[..., Any], model: PreTrainedModel, call: GenerateBatchCall, request: Request
) -> Prepared:
    """Let the original `generate` prepare one sequence, and check the result."""
    device = execution_device(model.get_input_embeddings())
    input_ids = torch.tensor([request.prompt], device=device)
    arguments = dict(call.arguments)
    if call.allowed is not None:
        arguments["prefix_allowed_tokens_fn"] = lambda _, ids: call.allowed(request.number, ids)
    mask = torch.ones_like(input_ids)
    return generate(
        model, input_ids, attention_mask=mask, custom_generate=_take_prepared, **arguments
    )


def run_continuous_batch(batch: ContinuousBatch | None, progress_bar: bool) -> SpecBatchOutput:
    """Generate all sequences, with the models active from the first step to the last."""
    if batch is None:
        return SpecBatchOutput([], SpecStats([]))
    outputs: dict[str, SpecRequestOutput] = {}
    total = len(batch.request_ids)
    with tqdm(total=total, disable=not progress_bar, unit="request") as bar, batch.active():
        while batch.unfinished:
            ended = batch.step()
            outputs.update((output.request_id, output) for output in ended)
            bar.update(len(ended))
    publish_stats(batch.stats)
    return SpecBatchOutput([outputs[name] for name in batch.request_ids], batch.stats)


def _take_prepared(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Prepared:
    """Return what `generate()` prepared, instead of decoding."""
    stop = StopRules(for_one_sequence(stopping_criteria), 1)
    check_inputs(model, input_ids, torch.ones_like(input_ids), model_kwargs, stop.max_length)
    if own_prefill.is_needed(model, torch.ones_like(input_ids), model_kwargs):
        raise UnsupportedError(
            f"{type(model).__name__} must run such prompts (images, bidirectional attention, a "
            "length past its rotary limit) separately, but generate_batch() packs them with the "
            "drafts of other sequences; use generate()"
        )
    check_processors(logits_processor, 1)
    check_ranks(model, input_ids, bool(generation_config.do_sample))
    return Prepared(logits_processor, stop, bool(generation_config.do_sample))


def read_prompts(inputs: object, vocab: int) -> list[list[int]]:
    """Return the prompts as lists of token ids from 0 to `vocab` - 1."""
    if not isinstance(inputs, (list, tuple)):
        raise OptionError(
            f"inputs of type {type(inputs).__name__}: generate_batch() takes a list of prompts "
            "without padding, each a list of token ids or a 1-D tensor, such as "
            "tokenizer(texts).input_ids"
        )
    prompts = []
    for number, prompt in enumerate(inputs):
        try:
            # operator.index accepts integers of any type, but neither strings nor rows of a tensor.
            ids: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt
            tokens = [operator.index(token) for token in ids]
        except TypeError as error:
            raise OptionError(
                f"prompt {number} is {prompt!r}, neither a list of token ids nor a 1-D tensor; "
                "tokenizer(texts).input_ids is a list of prompts"
            ) from error
        if not tokens or min(tokens) < 0 or max(tokens) >= vocab:
            values = f"values from {min(tokens)} to {max(tokens)}" if tokens else "no token"
            raise UnsupportedError(
                f"prompt {number} has {values}; every prompt needs token ids from 0 to {vocab - 1}"
            )
        prompts.append(tokens)
    return prompts


def _num_sequences(settings: Settings) -> int:
    count = settings["num_return_sequences"] or 1
    if not isinstance(count, int) or count < 1:
        raise OptionError(f"num_return_sequences={count!r} must be a whole number of at least 1")
    if count > 1 and not settings["do_sample"]:
        raise OptionError(
            f"num_return_sequences={count} without do_sample=True would return the same sequence "
            f"{count} times; set do_sample=True"
        )
    return count


def _requests(prompts: list[list[int]], count: int) -> list[Request]:
    """Return `count` requests per prompt, named and ordered as in transformers."""
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        children = (f"req_{number}__child#{child}" for child in range(count - 1))
        for request_id in (*children, f"req_{number}"):
            requests.append(Request(len(requests), request_id, number, prompt))
    return requests

"""`model.generate_batch(prompts, spec_strategy=...)`: any number of prompts, a few at a time.

transformers has a `generate_batch` of its own, which serves every call without a strategy. With
one, sequences follow each other in the rows of one speculative batch (continuous batching, see
`hf_spec.engine.decode.continuous_batching`). Arguments, request ids and outputs are named as they
are there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.logits_processors import check_processors
from hf_spec.engine.decode.stopping import StopRules, for_one_sequence
from hf_spec.engine.forward.row_batch import BATCHING
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.generation import own_prefill
from hf_spec.generation.call_checks import Settings, check_batch_streamer, check_inputs
from hf_spec.generation.settling import settle, stop_strings_to_criteria, with_own_storage

# Sequences at a time where the call does not say.
MAX_BATCH = 8

# Arguments of generate() or of transformers' generate_batch() without a meaning here.
REFUSED_ARGUMENTS = {
    "continuous_batching_config": "max_batch= says how many sequences run at a time",
    "persistent_manager": "nothing is kept between calls",
    "record_timestamps": "a BatchStreamer is given every token when it comes",
    "input_ids": "pass the prompts as the first argument",
    "attention_mask": "pass prompts without padding",
    "position_ids": "the positions are those of the tokens in their prompt",
    **dict.fromkeys(CACHE_NAMES, "every prompt is run from its first token"),
    "return_dict_in_generate": "the outputs are objects in any case",
    "output_scores": "generate() returns scores",
    "output_logits": "generate() returns logits",
}


@dataclass(frozen=True)
class GenerateBatchCall:
    """A call of `generate_batch()`, read and checked.

    Attributes:
        requests: the sequences to generate.
        max_batch: most of them at a time.
        batching: what is padded, a key of `BATCHING`.
        streamer: a `BatchStreamer` or None.
        allowed: `prefix_allowed_tokens_fn`, which is called with the number of the prompt.
        arguments: the others, for `generate()`.
    """

    requests: list[Request]
    max_batch: int
    batching: str
    streamer: Any
    allowed: Any
    arguments: dict[str, Any]

    @classmethod
    def read(
        cls, model: PreTrainedModel, batching: str, settings: Settings, arguments: Mapping[str, Any]
    ) -> GenerateBatchCall:
        """Read the arguments of a call; refuse what is wrong or cannot be served."""
        given = dict(arguments)
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"generate_batch() takes token ids, and {type(model).__name__} also the input of "
                "an encoder; use generate(), which takes batches too"
            )
        for name, remedy in REFUSED_ARGUMENTS.items():
            if (value := given.pop(name, None)) is not None and value is not False:
                raise UnsupportedError(
                    f"{name}= cannot be combined with spec_strategy in generate_batch(): {remedy}"
                )
        if BATCHING[batching].pads_kv:
            raise OptionError(
                f"batching={batching!r} keeps the keys and values of all rows aligned, which rows "
                "that begin at different times cannot be; use 'unpadded' or 'unpadded_kv'"
            )
        max_batch = given.pop("max_batch", None)
        max_batch = MAX_BATCH if max_batch is None else max_batch
        if not isinstance(max_batch, int) or isinstance(max_batch, bool) or max_batch < 1:
            raise OptionError(f"max_batch={max_batch!r} must be a whole number of at least 1")
        streamer = given.pop("streamer", None)
        check_batch_streamer(streamer)
        prompts = read_prompts(given.pop("inputs", None), num_embeddings(model))
        requests = _requests(prompts, _copies(settings))
        if settings["pad_token_id"] is None:
            # Nothing is padded; without a token for it, generate() would warn of every prompt.
            given["pad_token_id"] = 0
        # It has no meaning for transformers' own method, where compiled code is warmed up.
        given.pop("warmup", None)
        allowed = given.pop("prefix_allowed_tokens_fn", None)
        given["num_return_sequences"] = 1
        return cls(requests, max_batch, batching, streamer, allowed, given)


def settle_batch(
    model: PreTrainedModel, strategy: Any, given: dict[str, Any]
) -> tuple[StrategyConfig, GenerateBatchCall]:
    """The strategy of a call whose model and settings it can serve, and the call."""
    config, settings = settle(model, strategy, given)
    call = GenerateBatchCall.read(
        model, config.batching, settings, with_own_storage(settings, given)
    )
    arguments = stop_strings_to_criteria(settings["stop_strings"], call.arguments)
    return config, replace(call, arguments=arguments)


def make_continuous_batch(
    generate: Callable[..., Any],
    model: PreTrainedModel,
    drafter: Drafter,
    call: GenerateBatchCall,
) -> ContinuousBatch:
    """The sequences of a call, ready to begin.

    `generate` is the original method, which prepares processors and stop rules of each prompt.
    """

    def prepare(request: Request) -> Prepared:
        return prepare_request(generate, model, call, request)

    return ContinuousBatch(
        model, drafter, call.requests, prepare, call.max_batch, call.streamer, call.batching
    )


def prepare_request(
    generate: Callable[..., Any], model: PreTrainedModel, call: GenerateBatchCall, request: Request
) -> Prepared:
    """Let `generate`, the original method, prepare one sequence; refuse what cannot be served."""
    device = execution_device(model.get_input_embeddings())
    input_ids = torch.tensor([request.prompt], device=device)
    own = dict(call.arguments)
    if call.allowed is not None:
        own["prefix_allowed_tokens_fn"] = lambda _, ids: call.allowed(request.number, ids)
    mask = torch.ones_like(input_ids)
    return generate(model, input_ids, attention_mask=mask, custom_generate=_take, **own)


def run_continuous_batch(batch: ContinuousBatch | None, progress_bar: bool) -> SpecBatchOutput:
    """Generate everything; the models stay ready from the first step to the last."""
    if batch is None:
        return SpecBatchOutput([], SpecStats([]))
    found: dict[str, SpecRequestOutput] = {}
    total = len(batch.request_ids)
    with tqdm(total=total, disable=not progress_bar, unit="request") as bar, batch.active():
        while batch.unfinished:
            ended = batch.step()
            found.update((output.request_id, output) for output in ended)
            bar.update(len(ended))
    publish_stats(batch.stats)
    return SpecBatchOutput([found[name] for name in batch.request_ids], batch.stats)


def _take(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Prepared:
    """Take what `generate()` prepared, in place of a decoding loop."""
    stop = StopRules(for_one_sequence(stopping_criteria), 1)
    check_inputs(model, input_ids, torch.ones_like(input_ids), model_kwargs, stop.max_length)
    if own_prefill.is_needed(model, torch.ones_like(input_ids), model_kwargs):
        raise UnsupportedError(
            f"{type(model).__name__} has to run such prompts (images, attention in both directions,"
            " a length past its rotary limit) by themselves, and generate_batch() runs them with "
            "the drafts of others; use generate()"
        )
    check_processors(logits_processor, 1)
    check_ranks(model, input_ids, bool(generation_config.do_sample))
    return Prepared(logits_processor, stop, bool(generation_config.do_sample))


def read_prompts(inputs: object, vocab: int) -> list[list[int]]:
    """The prompts as lists of token ids below `vocab`."""
    if not isinstance(inputs, (list, tuple)):
        raise OptionError(
            f"inputs of type {type(inputs).__name__}: generate_batch() takes a list of prompts "
            "without padding, each a list of token ids or a 1-D tensor; tokenizer(texts).input_ids "
            "is one"
        )
    prompts = []
    for number, prompt in enumerate(inputs):
        try:
            # An index is a whole number of any kind, and neither a text nor a row of a table.
            ids: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt
            tokens = [operator.index(token) for token in ids]
        except TypeError as error:
            raise OptionError(
                f"prompt {number} is {prompt!r}, which is no list of token ids and no 1-D "
                "tensor; tokenizer(texts).input_ids holds such lists"
            ) from error
        if not tokens or min(tokens) < 0 or max(tokens) >= vocab:
            what = f"values from {min(tokens)} to {max(tokens)}" if tokens else "no token"
            raise UnsupportedError(
                f"prompt {number} holds {what}; every prompt needs token ids, and those of the "
                f"model are 0 to {vocab - 1}"
            )
        prompts.append(tokens)
    return prompts


def _copies(settings: Settings) -> int:
    """How many sequences each prompt is for."""
    copies = settings["num_return_sequences"] or 1
    if not isinstance(copies, int) or copies < 1:
        raise OptionError(f"num_return_sequences={copies!r} must be a whole number of at least 1")
    if copies > 1 and not settings["do_sample"]:
        raise OptionError(
            f"num_return_sequences={copies} without do_sample=True would be the same sequence "
            f"{copies} times"
        )
    return copies


def _requests(prompts: list[list[int]], copies: int) -> list[Request]:
    """Named as transformers names them: further sequences of a prompt before its own."""
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        further = (f"req_{number}__child#{child}" for child in range(copies - 1))
        for request_id in (*further, f"req_{number}"):
            requests.append(Request(len(requests), request_id, number, prompt))
    return requests

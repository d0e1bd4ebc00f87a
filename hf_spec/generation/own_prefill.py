"""A first round that is the model's own forward over its prompt, in one piece.

Some prompts are more than tokens that look back: images stand in them, they are read in both
directions, or rotary frequencies follow from their length. The model runs such a prompt as in plain
`generate()`, with all its inputs. What it says last is judged like a draft tree that is a root
alone, and its keys and values are taken over. All that is left of an image after that is where the
text goes on: one offset of the positions per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_spec.common.compat import cache_argument, find_cache, stored_tokens, without_cache
from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import finish_step
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.runner import ModelRunner
from hf_spec.engine.models.support_checks import takes_images
from hf_spec.generation.length_checks import is_past_rope

# Inputs that say what a prompt shows. Models need them in the forward of the prompt alone.
IMAGE_INPUTS = frozenset(
    {
        "high_res_pixel_values",
        "image_grid_thw",
        "image_patches",
        "image_patches_indices",
        "image_position_ids",
        "image_sizes",
        "mm_encoder_outputs",
        "mm_token_type_ids",
        "num_local_patches",
        "patches_grid",
        "pixel_attention_mask",
        "pixel_mask",
        "pixel_values",
        "pixel_values_images",
        "pixel_values_local",
        "spatial_shapes",
        "token_type_ids",
    }
)


def is_needed(
    model: PreTrainedModel, attention_mask: Tensor, model_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the model has to run its prompt by itself.

    Args:
        model: the target.
        attention_mask: (B, L).
        model_kwargs: what `generate()` prepared for the model.
    """
    config: Any = model.config.get_text_config()
    # "vision" stands for images that are read in both directions, in a text that is not.
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or is_past_rope(model, attention_mask):
        return True
    if not takes_images(model):
        return False
    positions = model_kwargs.get("position_ids")
    shows = any(says_something(model_kwargs.get(name)) for name in IMAGE_INPUTS)
    return shows or (
        positions is not None and positions.ndim == 3 and is_moved(positions, attention_mask)
    )


def says_something(value: Any) -> bool:
    """Whether an input is more than empty, or than zeros for every token."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        return bool(value.any())
    return value is not None and (isinstance(value, Tensor) or bool(value))


def is_moved(position_ids: Tensor, attention_mask: Tensor) -> bool:
    """Whether positions, (..., B, L), are other than 0, 1, 2, ... over the attended tokens."""
    expected = attention_mask.long().cumsum(-1) - 1
    return bool(((position_ids != expected) & (attention_mask == 1)).any())


@dataclass(frozen=True)
class Prompt:
    """What a model reads in its first forward.

    Attributes:
        input_ids, attention_mask: (B, L) int64, padded on the left.
        model_kwargs: what `generate()` prepared beside them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    model_kwargs: Mapping[str, Any]

    @property
    def stored(self) -> int:
        """How many tokens of each row a reused cache holds."""
        return stored_tokens(find_cache(self.model_kwargs))

    def run(self, runner: ModelRunner) -> ForwardOutput:
        """Run it; its keys and values are in the pool afterwards, a reused cache is as it was."""
        cache = copy.deepcopy(find_cache(self.model_kwargs))
        model: Any = runner.model
        prepare = model.prepare_inputs_for_generation
        inputs = prepare(
            self.input_ids,
            next_sequence_length=self.input_ids.shape[1] - self.stored,
            is_first_iteration=True,
            **without_cache(self.model_kwargs),
            **cache_argument(prepare, cache),
        )
        masks = list(self.attention_mask.bool().cpu())
        return runner.prefill(inputs, masks, _offsets(inputs.get("position_ids"), masks))


def first_round(
    prompt: Prompt,
    target: ModelRunner,
    drafter: Drafter,
    verifier: Verifier,
    state: GenerationState,
    read: Callable[..., Prompt] | None = None,
) -> None:
    """Let the target run its prompt, and commit what it says next; nothing is drafted yet.

    `read` gives the prompt as a draft model reads it; without it such models see placeholders.
    """
    with state.clock("draft"):
        if read is not None:
            drafter.prefill(partial(_fill, target=target.model, prompt=prompt, read=read))
        tree = drafter.draft(state, dict.fromkeys(state.unfinished, 0))
    with state.clock("verify"):
        output = prompt.run(target)
    finish_step(target, drafter, verifier, state, tree, output)


def _fill(
    runner: ModelRunner, target: PreTrainedModel, prompt: Prompt, read: Callable[..., Prompt]
) -> None:
    """Let a draft model that takes images run the prompt; others see placeholders, as tokens.

    So does every draft model where the images of earlier turns are in the target's cache alone.
    """
    draft = runner.model
    if not takes_images(draft) or prompt.stored:
        return
    kinds = [model.config.model_type for model in (target, draft)]
    if kinds[0] != kinds[1]:
        raise AssistantError(
            f"the assistant {type(draft).__name__} takes images as {kinds[1]!r} does, the target "
            f"as {kinds[0]!r}; draft with a model of the target's kind, with a text model of the "
            "same vocabulary, or with spec_strategy='lookup'"
        )
    read(draft, prompt).run(runner)


def _offsets(position_ids: Tensor | None, masks: Sequence[Tensor]) -> list[int]:
    """Per row how far its positions go on after the prompt from the number of its tokens."""
    if position_ids is None:
        return [0] * len(masks)
    last = position_ids[..., -1].cpu()
    if last.ndim == 2:
        # Of four, the first counts tokens; the others are time, height and width.
        last = last[1:] if len(last) == 4 else last
        if bool((last != last[0]).any()):
            raise UnsupportedError(
                "a prompt that ends inside an image goes on at three positions at once, where a "
                "draft tree has one; put text after the image"
            )
        last = last[0]
    places = last.expand(len(masks)).tolist()
    return [place + 1 - int(mask.sum()) for place, mask in zip(places, masks, strict=True)]


def read_prompt(
    generate: Callable[..., Any], given: Mapping[str, Any], draft: PreTrainedModel, prompt: Prompt
) -> Prompt:
    """The prompt as a draft model reads it.

    Args:
        generate: the original method, which runs the vision tower and places the tokens.
        given: the arguments of the call, images among them.
        draft: the draft model.
        prompt: as the target reads it.
    """
    images = {name: given[name] for name in IMAGE_INPUTS if name in given}
    named = (given.get(name) for name in ("input_ids", "inputs"))
    rows = next((ids for ids in named if ids is not None), prompt.input_ids)
    copies = len(prompt.input_ids) // len(rows)
    config = GenerationConfig(
        max_new_tokens=1, do_sample=copies > 1, num_return_sequences=copies, pad_token_id=0
    )
    model_kwargs: dict[str, Any] = generate(
        draft,
        input_ids=prompt.input_ids[::copies],
        attention_mask=prompt.attention_mask[::copies],
        generation_config=config,
        custom_generate=_take,
        **images,
    )
    return replace(prompt, model_kwargs=model_kwargs)


def _take(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> dict[str, Any]:
    """Take what `generate()` prepared for the model, in place of a decoding loop."""
    return model_kwargs

"""Prompts that the model runs by itself, without a draft, as in plain `generate()`.

They contain images, attend in both directions, their length changes the rotary frequencies, or
tokens of one forward pass are not independent. The model runs such a prompt in one piece as in
plain `generate()`, with all its inputs. Its last logits are verified like a draft tree of roots
only, and its keys and values are copied to the KV pool. After that, an image only matters as one
position offset per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_spec.backend.device.placement import looks_for_outliers
from hf_spec.common.compat import cache_argument, find_cache, stored_tokens, without_cache
from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import finish_step
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.models.support_checks import takes_images
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation.target_checks import is_past_rope

# Inputs with the images of a prompt. Models need them only in the prefill.
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
    """Return True if the model's own forward pass must run its (B, L) prompt."""
    config: Any = model.config.get_text_config()
    # The value "vision" means that only images are bidirectional.
    bidirectional = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if bidirectional or is_past_rope(model, attention_mask):
        return True
    if not takes_images(model):
        return False
    positions = model_kwargs.get("position_ids")
    has_images = any(has_content(model_kwargs.get(name)) for name in IMAGE_INPUTS)
    return has_images or (
        positions is not None and positions.ndim == 3 and is_shifted(positions, attention_mask)
    )


def shares_outliers(model: PreTrainedModel) -> bool:
    """Return True if a draft in the forward pass of a prompt would change the prompt's result.

    8-bit layers of bitsandbytes leave inputs unquantized where any row has an outlier.
    """
    return any(map(looks_for_outliers, model.modules()))


def has_content(value: Any) -> bool:
    """Return True for an input that is neither empty nor integer zeros."""
    if isinstance(value, Tensor) and not value.is_floating_point():
        return bool(value.any())
    return value is not None and (isinstance(value, Tensor) or bool(value))


def is_shifted(position_ids: Tensor, attention_mask: Tensor) -> bool:
    """Return True if (..., B, L) positions of the attended tokens are not 0, 1, 2, ..."""
    expected = attention_mask.long().cumsum(-1) - 1
    return bool(((position_ids != expected) & (attention_mask == 1)).any())


@dataclass(frozen=True)
class Prompt:
    """Inputs of a model's prefill: (B, L) int64, padded on the left, and further ones.

    `read` returns the prompt of a draft model with images or an encoder; without it, draft models
    run on placeholder tokens, or on the output of the target's encoder.
    """

    input_ids: Tensor
    attention_mask: Tensor
    model_kwargs: Mapping[str, Any]
    read: Callable[[PreTrainedModel, Prompt], Prompt] | None = None

    @property
    def stored(self) -> int:
        """Number of tokens per row in a reused cache."""
        return stored_tokens(find_cache(self.model_kwargs))

    def run(self, runner: ModelRunner) -> ForwardOutput:
        """Run the prefill and store its keys and values; a reused cache is not changed.

        It runs again if the device runs out of memory: until it ends it changes only its own cache.
        """
        return runner.rows.pool.retried(partial(self._run, runner))

    def _run(self, runner: ModelRunner) -> ForwardOutput:
        cache = _copied(find_cache(self.model_kwargs))
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
) -> None:
    """Prefill the target and commit one token per row, without a draft."""
    with state.clock("draft"):
        drafter.visit_runner(partial(_prefill_draft_model, target=target.model, prompt=prompt))
        tree = drafter.draft(state, dict.fromkeys(state.unfinished, 0))
    with state.clock("verify"):
        output = prompt.run(target)
    finish_step(target, drafter, verifier, state, tree, output)


def _copied(cache: Any) -> Any:
    """Return a deep copy of a cache. Its tensors are detached: `deepcopy` fails for others."""
    attributes = [value for layer in getattr(cache, "layers", ()) for value in vars(layer).values()]
    # Recurrent layers have dictionaries of states.
    states = [part for value in attributes if isinstance(value, dict) for part in value.values()]
    tensors = [value for value in (*attributes, *states) if isinstance(value, Tensor)]
    return copy.deepcopy(cache, {id(tensor): tensor.detach().clone() for tensor in tensors})


def _prefill_draft_model(runner: ModelRunner, target: PreTrainedModel, prompt: Prompt) -> None:
    """Prefill a draft model that takes images; others run on placeholder tokens.

    So do all draft models if images of earlier turns are only in the target's cache.
    """
    draft = runner.model
    if prompt.read is None or not takes_images(draft) or prompt.stored:
        return
    target_type, draft_type = (model.config.model_type for model in (target, draft))
    if target_type != draft_type:
        raise AssistantError(
            f"the assistant {type(draft).__name__} takes images like {draft_type!r}, but the "
            f"target like {target_type!r}; draft with a model of the target's type, with a text "
            "model of the same vocabulary, or with spec_strategy='lookup'"
        )
    prompt.read(draft, prompt).run(runner)


def _offsets(position_ids: Tensor | None, masks: Sequence[Tensor]) -> list[int]:
    """Return per row the next position after the prompt minus its number of tokens."""
    if position_ids is None:
        return [0] * len(masks)
    last = position_ids[..., -1].cpu()
    if last.ndim == 2:
        # The first of four counts tokens; the others are time, height and width.
        last = last[1:] if len(last) == 4 else last
        if bool((last != last[0]).any()):
            raise UnsupportedError(
                "a prompt that ends inside an image continues with three different positions, but "
                "a draft tree has one per token; put text after the image"
            )
        last = last[0]
    positions = last.expand(len(masks)).tolist()
    return [position + 1 - int(mask.sum()) for position, mask in zip(positions, masks, strict=True)]


def read_prompt(
    generate: Callable[..., Any],
    arguments: Mapping[str, Any],
    draft: PreTrainedModel,
    prompt: Prompt,
) -> Prompt:
    """Return the prompt with the inputs that a draft model prepares from the call's images."""
    images = {name: arguments[name] for name in IMAGE_INPUTS if name in arguments}
    candidates = (arguments.get(name) for name in ("input_ids", "inputs"))
    rows = next((ids for ids in candidates if ids is not None), prompt.input_ids)
    copies = len(prompt.input_ids) // len(rows)
    config = GenerationConfig(
        max_new_tokens=1, do_sample=copies > 1, num_return_sequences=copies, pad_token_id=0
    )
    # The original method runs the vision tower and inserts the tokens.
    model_kwargs: dict[str, Any] = generate(
        draft,
        input_ids=prompt.input_ids[::copies],
        attention_mask=prompt.attention_mask[::copies],
        generation_config=config,
        custom_generate=_take_model_kwargs,
        **images,
    )
    return replace(prompt, model_kwargs=model_kwargs)


def _take_model_kwargs(
    *_: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> dict[str, Any]:
    """Return what `generate()` prepared for the model, instead of decoding."""
    return model_kwargs

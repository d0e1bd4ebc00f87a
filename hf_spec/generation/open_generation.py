"""A target that answers requests as they arrive, each with its own generation config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.engine.decode.continuous_batching import OpenBatch, Prepared, Request
from hf_spec.generation.call_setup import build_drafter, resolve_call
from hf_spec.generation.generate_batch import prepare_request, resolve_batch_call
from hf_spec.generation.hook import original_generate
from hf_spec.methods.registry import parse_strategy


@dataclass(frozen=True)
class Ready:
    """A checked request that can begin at any time."""

    request: Request
    prepared: Prepared


class OpenGeneration:
    """A target with a strategy, for `OpenBatch`."""

    def __init__(self, model: PreTrainedModel, strategy: Any, assistant: Any, tokenizer: Any):
        self.model, self.assistant, self._tokenizer = model, assistant, tokenizer
        self.config, _ = resolve_call(model, strategy, {})
        # Errors of the assistant are raised here, not by the first request.
        self._make_drafter()

    def prepare(self, request_id: str, prompt: list[int], config: GenerationConfig) -> Ready:
        """Check and prepare a prompt; `config` is updated and must not be reused."""
        strategy = getattr(config, "spec_strategy", None)
        if strategy is not None and parse_strategy(strategy) != self.config:
            raise OptionError(
                f"spec_strategy={strategy!r}: all requests share their forward passes and so the "
                f"strategy, which is {self.config.strategy!r} here; leave it out"
            )
        arguments = {"inputs": [prompt], "generation_config": config, "tokenizer": self._tokenizer}
        call = resolve_batch_call(self.model, self.config, arguments)
        # transformers warns about settings next to a config.
        call = replace(call, arguments=config.update(**call.arguments))
        # Only one sequence, whatever num_return_sequences is.
        request = replace(call.requests[-1], request_id=request_id)
        return Ready(request, prepare_request(original_generate(), self.model, call, request))

    def make_batch(self, num_slots: int, on_tokens: Callable[[str, list[int]], None]) -> OpenBatch:
        """Return an empty batch; see `OpenBatch`."""
        drafter, batching = self._make_drafter(), self.config.batching
        return OpenBatch(self.model, drafter, num_slots, on_tokens, batching)

    def _make_drafter(self) -> Any:
        arguments = {"tokenizer": self._tokenizer}
        return build_drafter(self.config, self.model, self.assistant, arguments)

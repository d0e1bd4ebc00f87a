"""One model that answers requests as they come, each with a generation config of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.engine.decode.continuous_batching import Prepared, Request
from hf_spec.engine.decode.open_batch import OpenBatch
from hf_spec.generation.generate_batch import prepare_request, settle_batch
from hf_spec.generation.hook import original_generate
from hf_spec.generation.settling import build_drafter, settle
from hf_spec.methods.registry import parse_strategy


@dataclass(frozen=True)
class Ready:
    """A request that has been checked and can begin at any time."""

    request: Request
    prepared: Prepared


class OpenGeneration:
    """A target with a strategy, for `OpenBatch`.

    Raises:
        SpecError: if the model cannot be served, or the strategy lacks its assistant.
    """

    def __init__(self, model: PreTrainedModel, strategy: Any, assistant: Any, tokenizer: Any):
        self.model, self.assistant, self._tokenizer = model, assistant, tokenizer
        self.config, _ = settle(model, strategy, {})
        # What an assistant lacks is said now and not to the first who asks.
        self._make_drafter()

    def prepare(self, request_id: str, prompt: list[int], config: GenerationConfig) -> Ready:
        """Check a prompt and its settings, which become this request's own, and prepare both.

        Raises:
            SpecError: if something cannot be served exactly.
            ValueError: what `generate()` says of its settings.
        """
        own = getattr(config, "spec_strategy", None)
        if own is not None and parse_strategy(own) != self.config:
            raise OptionError(
                f"spec_strategy={own!r}: all requests share their forwards, so they share the "
                f"strategy, which is {self.config.strategy!r} here; leave it out"
            )
        given = {"inputs": [prompt], "generation_config": config, "tokenizer": self._tokenizer}
        _, call = settle_batch(self.model, self.config, given)
        # transformers warns of settings beside a config.
        call = replace(call, arguments=config.update(**call.arguments))
        # Further sequences of the prompt are not asked for.
        request = replace(call.requests[-1], request_id=request_id)
        return Ready(request, prepare_request(original_generate(), self.model, call, request))

    def make_batch(self, num_slots: int, on_tokens: Callable[[str, list[int]], None]) -> OpenBatch:
        """An empty batch; `on_tokens` gets the id of a request and its newest tokens."""
        drafter, batching = self._make_drafter(), self.config.batching
        return OpenBatch(self.model, drafter, num_slots, on_tokens, batching)

    def _make_drafter(self) -> Any:
        given = {"tokenizer": self._tokenizer}
        return build_drafter(self.config, self.model, self.assistant, given)

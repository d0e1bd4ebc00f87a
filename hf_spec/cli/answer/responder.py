"""Model, tokenizer and settings of `hf-spec generate` and `hf-spec chat`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.options import AnswerSettings, Placement
from hf_spec.common.errors import OptionError
from hf_spec.common.outputs import SpecGenerateOutput
from hf_spec.common.prompts import encode_chat
from hf_spec.methods.entries import parse_entries


class Responder:
    """Target model with its tokenizer, settings and strategy (`entry`)."""

    def __init__(
        self, model: Any, tokenizer: Any, settings: AnswerSettings, assistants: Sequence[str] = ()
    ):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.assistants = assistants
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        self.set_strategy(settings.strategy)

    @classmethod
    def load(
        cls,
        name: str,
        placement: Placement,
        settings: AnswerSettings,
        assistants: Sequence[str] | None = None,
    ) -> Responder:
        """Check strategy and assistants, then load the model `name`; raises `SpecError`."""
        parse_entries([settings.strategy], assistants or ())
        model, tokenizer = load_target(name, placement), load_tokenizer(name)
        return cls(model, tokenizer, settings, assistants or ())

    def set_strategy(self, strategy: str) -> None:
        """Use another strategy in command line syntax; raises the errors of `parse_entries`."""
        [self.entry] = parse_entries([strategy], self.assistants, others_follow=True)

    def encode(self, messages: list[dict[str, str]]) -> Tensor:
        """Return (1, L) int64 ids of a conversation in the chat template.

        A tokenizer without one raises `OptionError`.
        """
        if self.tokenizer.chat_template is None:
            raise OptionError(
                f"{self.tokenizer.name_or_path} has no chat template; use hf-spec generate --raw "
                "to continue a text"
            )
        return encode_chat(self.tokenizer, messages)

    def encode_text(self, text: str, chat_template: bool | None) -> Tensor:
        """Return (1, L) int64 ids of a text; None uses the chat template if there is one."""
        if chat_template is None:
            chat_template = self.tokenizer.chat_template is not None
        if chat_template:
            return self.encode([{"role": "user", "content": text}])
        ids: Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return ids

    def generate(self, ids: Tensor, streamer: Any = None) -> SpecGenerateOutput:
        """Generate after (1, L) ids; raises `SpecError`, also if they exceed the context."""
        check_context_length(self.model, ids.shape[1], self.settings.max_new_tokens)
        ids = ids.to(self.model.device)
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            return_dict_in_generate=True,
            **self._arguments,
        )

    def generate_each(
        self, prompts: Sequence[Tensor], batch_size: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Generate after all (1, L) ids in a batch; yield (index, new tokens) as they finish.

        Raises the errors of `generate`, and `RuntimeError` if a sequence ends with one.
        """
        for ids in prompts:
            check_context_length(self.model, ids.shape[1], self.settings.max_new_tokens)
        inputs = [ids[0].tolist() for ids in prompts]
        outputs = self.model.generate_batch_iter(inputs, max_batch=batch_size, **self._arguments)
        for output in outputs:
            number = int(output.request_id.removeprefix("req_"))
            if output.error is not None:
                raise RuntimeError(f"prompt {number} ended with an error: {output.error}")
            yield number, output.generated_tokens

    @property
    def _arguments(self) -> dict[str, Any]:
        length = {"max_new_tokens": self.settings.max_new_tokens}
        return {**length, **self.entry.method, **self.settings.sampling}


def check_context_length(model: Any, prompt_len: int, new_tokens: int) -> None:
    """Raise `OptionError` if prompt and new tokens exceed the model's context."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and prompt_len + new_tokens > longest:
        raise OptionError(
            f"the prompt has {prompt_len} tokens; with {new_tokens} new tokens it exceeds the "
            f"model's context of {longest}: shorten it, or lower --max-new-tokens"
        )

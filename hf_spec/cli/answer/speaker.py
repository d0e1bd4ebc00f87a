"""A model that answers prompts with a strategy, as `generate` and `chat` use it."""

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
from hf_spec.evaluation.bench.entries import parse_entries


class Speaker:
    """A target model, its tokenizer, and how it generates."""

    def __init__(
        self, model: Any, tokenizer: Any, settings: AnswerSettings, assistants: Sequence[str] = ()
    ):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.assistants = assistants
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        self.choose(settings.strategy)

    @classmethod
    def load(
        cls,
        name: str,
        placement: Placement,
        settings: AnswerSettings,
        assistants: Sequence[str] | None = None,
    ) -> Speaker:
        """Load the model `name`, once strategy and assistants have been checked.

        Raises:
            SpecError: as `choose`, and if there is no such model.
        """
        parse_entries([settings.strategy], assistants or ())
        model, tokenizer = load_target(name, placement), load_tokenizer(name)
        return cls(model, tokenizer, settings, assistants or ())

    def choose(self, strategy: str) -> None:
        """Use another strategy, written as on the command line; errors as of `parse_entries`."""
        [self.entry] = parse_entries([strategy], self.assistants, others_follow=True)

    def encode(self, messages: list[dict[str, str]]) -> Tensor:
        """(1, L) int64: a conversation in the model's chat template, open for its answer.

        Raises:
            OptionError: if the tokenizer has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise OptionError(
                f"{self.tokenizer.name_or_path} has no chat template, so it continues texts only: "
                "hf-spec generate --raw"
            )
        return encode_chat(self.tokenizer, messages)

    def encode_text(self, text: str, chat_template: bool | None) -> Tensor:
        """(1, L) int64: a text in the chat template, or as it is; None: in one if there is one."""
        if chat_template is None:
            chat_template = self.tokenizer.chat_template is not None
        if chat_template:
            return self.encode([{"role": "user", "content": text}])
        ids: Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return ids

    def generate(self, ids: Tensor, streamer: Any = None) -> SpecGenerateOutput:
        """Generate after (1, L) ids.

        Raises:
            OptionError: if prompt and output are longer than the model's context.
            SpecError: if the model cannot be served.
        """
        check_room(self.model, ids.shape[1], self.settings.max_new_tokens)
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
        """Generate after each (1, L) ids, so many at a time: its number and its new tokens.

        They come in the order in which they end; errors are those of `generate`.

        Raises:
            RuntimeError: if one cannot be generated to its end.
        """
        for ids in prompts:
            check_room(self.model, ids.shape[1], self.settings.max_new_tokens)
        given = [ids[0].tolist() for ids in prompts]
        ended = self.model.generate_batch_iter(given, max_batch=batch_size, **self._arguments)
        for output in ended:
            number = int(output.request_id.removeprefix("req_"))
            if output.error is not None:
                raise RuntimeError(f"prompt {number} ended with an error: {output.error}")
            yield number, output.generated_tokens

    @property
    def _arguments(self) -> dict[str, Any]:
        length = {"max_new_tokens": self.settings.max_new_tokens}
        return {**length, **self.entry.method, **self.settings.sampling}


def check_room(model: Any, prompt_len: int, new_tokens: int) -> None:
    """Refuse a prompt that with so many new tokens is longer than the model's context.

    Raises:
        OptionError: says by how much.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and prompt_len + new_tokens > longest:
        raise OptionError(
            f"the prompt has {prompt_len} tokens; with {new_tokens} new ones that is more than "
            f"the {longest} of the model's context: shorten it, or lower --max-new-tokens"
        )

"""A model that answers prompts with a strategy, as `generate` and `chat` use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_spec.bench.entries import Entry, parse_entries
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.method_options import Sampling
from hf_spec.data.prompts import encode_chat
from hf_spec.errors import OptionError
from hf_spec.outputs import SpecGenerateOutput


@dataclass
class Speaker:
    """A target model, its tokenizer, and how it generates.

    Attributes:
        model, tokenizer: of the target.
        max_new_tokens: longest output.
        sampling: how tokens are chosen.
        assistants: for strategies that name none.
        entry: the strategy in use, with its assistant.
    """

    model: Any
    tokenizer: Any
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    assistants: Sequence[str] = ()
    entry: Entry = field(init=False)

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str,
        device: str | None,
        strategy: str,
        assistants: Sequence[str] | None,
        **settings: Any,
    ) -> Speaker:
        """Load model and tokenizer, once strategy and assistants have been checked.

        Args:
            name: folder or Hub id.
            dtype: "auto" or a name of torch.
            device: of torch; None chooses.
            strategy: the one to begin with, as on the command line.
            assistants: for strategies that name none.
            **settings: the other attributes.

        Raises:
            SpecError: as `choose`, and if there is no such model.
        """
        parse_entries([strategy], assistants or ())
        model, tokenizer = load_target(name, dtype, device), load_tokenizer(name)
        speaker = cls(model, tokenizer, assistants=assistants or (), **settings)
        if speaker.sampling.seed is not None:
            torch.manual_seed(speaker.sampling.seed)
        speaker.choose(strategy)
        return speaker

    def choose(self, strategy: str) -> None:
        """Use another strategy, written as on the command line.

        Raises:
            OptionError: for an unknown strategy or option.
            AssistantError: if it lacks its assistant.
        """
        [self.entry] = parse_entries([strategy], self.assistants)

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

    def generate(self, ids: Tensor, streamer: Any = None) -> SpecGenerateOutput:
        """Generate after (1, L) ids.

        Raises:
            OptionError: if prompt and output are longer than the model's context.
            SpecError: if the model cannot be served.
        """
        self._check_length(ids.shape[1])
        ids = ids.to(self.model.device)
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
            **self.entry.method,
            **self.sampling.arguments(),
        )

    def _check_length(self, prompt_len: int) -> None:
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and prompt_len + self.max_new_tokens > longest:
            raise OptionError(
                f"the prompt has {prompt_len} tokens; with {self.max_new_tokens} new ones that is "
                f"more than the {longest} of the model's context: shorten it, or lower "
                "--max-new-tokens"
            )

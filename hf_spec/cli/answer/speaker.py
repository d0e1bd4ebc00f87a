"""A model that answers prompts with a strategy, as `generate` and `chat` use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_spec.bench.contenders import parse_entry, with_assistants
from hf_spec.cli.answer.options import Sampling
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.drafting.config import StrategyConfig
from hf_spec.errors import OptionError
from hf_spec.outputs import SpecGenerateOutput


def parse_choice(
    entry: str, assistants: Sequence[str]
) -> tuple[str, StrategyConfig, str | list[str] | None]:
    """Name, config and assistant of a strategy that is written as on the command line.

    Args:
        entry: NAME[:OPTION=JSON,...][@ASSISTANT].
        assistants: for strategies that name none.

    Raises:
        OptionError: for an unknown strategy or option.
        AssistantError: if it lacks its assistant.
    """
    [choice] = with_assistants([parse_entry(entry)], assistants)
    return choice


@dataclass
class Speaker:
    """A target model, its tokenizer, and how it generates.

    Attributes:
        model, tokenizer: of the target.
        max_new_tokens: longest output.
        sampling: how tokens are chosen.
        assistants: for strategies that name none.
        strategy: the one in use, with its assistant.
    """

    model: Any
    tokenizer: Any
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    assistants: tuple[str, ...] = ()
    name: str = field(init=False)
    strategy: StrategyConfig = field(init=False)
    assistant: Any = field(init=False)

    @classmethod
    def load(cls, name: str, dtype: str, device: str | None, **settings: Any) -> Speaker:
        """Load model and tokenizer.

        Args:
            name: folder or Hub id.
            dtype: "auto" or a name of torch.
            device: of torch; None chooses.
            **settings: the other attributes.
        """
        model = load_target(name, dtype, device)
        tokenizer = load_tokenizer(name)
        speaker = cls(model, tokenizer, **settings)
        if speaker.sampling.seed is not None:
            torch.manual_seed(speaker.sampling.seed)
        return speaker

    def choose(self, entry: str) -> None:
        """Use another strategy, written as on the command line.

        Raises:
            OptionError: for an unknown strategy or option.
            AssistantError: if it lacks its assistant.
        """
        self.name, self.strategy, self.assistant = parse_choice(entry, self.assistants)

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
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return encoded["input_ids"]

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
            spec_strategy=self.strategy,
            assistant=self.assistant,
            max_new_tokens=self.max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
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

"""Plain and speculative answers to the same prompt, with what is shown of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.cli.answer.speaker import check_room
from hf_spec.cli.demo.replay import Lane, Recorder
from hf_spec.common.errors import OptionError
from hf_spec.common.prompts import Prompt
from hf_spec.engine.models.support_checks import check_model
from hf_spec.evaluation.bench import contenders
from hf_spec.evaluation.bench.contenders import Contender, Run
from hf_spec.evaluation.bench.entries import Entry, resolve_entry
from hf_spec.evaluation.bench.runner import Plan, Record, time_contenders
from hf_spec.evaluation.trace.pictures import Canvas
from hf_spec.evaluation.trace.rounds import Round, draw_round, record_rounds
from hf_spec.training.responses import end_tokens


@dataclass(frozen=True)
class Comparison:
    """Two timed answers to one prompt, plain `generate()` first.

    Attributes:
        records: what was measured.
        lanes: their texts, piece by piece; a block of the second is a round.
        rounds: those of the second.
        decode: the tokenizer's.
    """

    records: tuple[Record, Record]
    lanes: tuple[Lane, Lane]
    rounds: Sequence[Round]
    decode: Callable[[Sequence[int]], str]

    @property
    def fullest(self) -> int:
        """The round in which most was accepted; the first of several, counted from 0."""
        gained = [len(one.verdict.accepted[0]) for one in self.rounds]
        return gained.index(max(gained))

    def picture(self, number: int) -> Canvas:
        """What was drafted in a round, counted from 0, and what became of it."""
        return draw_round(self.rounds[number], self.decode)


class Comparer:
    """A model in evaluation mode, and the strategies that it may be asked to use.

    Outputs are greedy. What the model's generation config stores for later calls, it has again
    after every answer.

    Raises:
        SpecError: if the model or one of the strategies cannot be used.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, entries: Sequence[Entry]):
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        # An adapter that does not fit is refused here, not when somebody asks.
        found = [resolve_entry(entry, model) for entry in entries]
        self.entries = {entry.name: entry for entry in found}

    def compare(self, text: str, strategy: str, new_tokens: int) -> Comparison:
        """Answer a prompt plainly, then with one of `entries`, by its name.

        Both begin the answer once before, untimed.

        Raises:
            OptionError: if there is nothing to answer, or no room for the answer.
        """
        if not text.strip():
            raise OptionError("the prompt is empty; write one")
        prompt = Prompt("prompt", "", (text,))
        check_room(self.model, prompt.encode(self.tokenizer).shape[1], new_tokens)
        recorder, rounds = Recorder(), list[list[Round]]()
        settings = {"do_sample": False, "streamer": recorder, "pad_token_id": self._pad}
        ways = [
            contenders.plain(self.model, settings),
            self._recorded(self.entries[strategy], settings, rounds),
        ]
        plan = Plan(new_tokens, 1, ends=frozenset(end_tokens(self.model)), device=self.model.device)
        with _plain_by_default(self.model):
            [records] = time_contenders(ways, [prompt], self.tokenizer, plan)
        # The first two were not timed.
        _, _, *recordings = recorder.recordings
        plain, ours = (
            recording.lane(record, self.tokenizer)
            for recording, record in zip(recordings, records, strict=True)
        )
        timed = records[0], records[1]
        return Comparison(timed, (plain, ours), rounds[-1], self.tokenizer.decode)

    def _recorded(
        self, entry: Entry, settings: dict[str, Any], rounds: list[list[Round]]
    ) -> Contender:
        """The strategy, which adds the rounds of every run to `rounds`."""

        def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
            given = torch.ones_like(ids) if mask is None else mask
            inputs = {"input_ids": ids, "attention_mask": given}
            output, found = record_rounds(
                self.model,
                {name: value.to(self.model.device) for name, value in inputs.items()},
                entry.config,
                entry.assistant,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                **settings,
            )
            rounds.append(found)
            return Run(output.sequences, output.spec_stats.target_forwards, output.spec_stats)

        return Contender(entry.name, run, ours=True)

    @property
    def _pad(self) -> int:
        # Without one generate() takes the end of a sequence, and warns at every call.
        pad = self.model.generation_config.pad_token_id
        return min(end_tokens(self.model), default=0) if pad is None else pad


@contextmanager
def _plain_by_default(model: Any) -> Iterator[None]:
    """A strategy that is stored with the model would make plain `generate()` speculate."""
    config = model.generation_config
    stored = config.spec_strategy
    if stored is None:
        yield
        return
    config.spec_strategy = None
    try:
        yield
    finally:
        config.spec_strategy = stored

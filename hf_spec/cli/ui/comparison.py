"""Timed plain and speculative answers to a prompt, with their recorded rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.cli.answer.responder import check_context_length
from hf_spec.cli.demo.replay import Lane, Recorder
from hf_spec.cli.demo.watch import CpuWatch
from hf_spec.common.errors import OptionError
from hf_spec.common.prompts import Prompt
from hf_spec.engine.models.support_checks import check_model
from hf_spec.evaluation.bench.contenders import Contender, Run, plain, without_stored_strategy
from hf_spec.evaluation.bench.runner import Plan, Record, time_contenders
from hf_spec.evaluation.trace.pictures import Canvas
from hf_spec.evaluation.trace.rounds import Round, draw_round, record_rounds
from hf_spec.methods.entries import Entry, resolve_entry
from hf_spec.training.responses import end_tokens


@dataclass(frozen=True)
class Comparison:
    """Two timed answers to one prompt, plain `generate()` first.

    Attributes:
        records: measurements.
        lanes: texts in pieces; a block of the second is a round.
        rounds: rounds of the second.
        decode: `decode` of the tokenizer.
        warning: about other programs, or "".
    """

    records: tuple[Record, Record]
    lanes: tuple[Lane, Lane]
    rounds: Sequence[Round]
    decode: Callable[[Sequence[int]], str]
    warning: str = ""

    @property
    def fullest(self) -> int:
        """Index of the first round with the most accepted tokens."""
        accepted = [len(r.verdict.accepted[0]) for r in self.rounds]
        return accepted.index(max(accepted))

    def picture(self, number: int) -> Canvas:
        """Draw the verified draft of a round, counted from 0."""
        return draw_round(self.rounds[number], self.decode)


class Comparer:
    """Model in evaluation mode with the strategies of the page; outputs are greedy.

    An unsupported model or strategy raises `SpecError`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, entries: Sequence[Entry]):
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        # An unsuitable adapter raises here, not at the first comparison.
        resolved = [resolve_entry(entry, model) for entry in entries]
        self.entries = {entry.name: entry for entry in resolved}

    def compare(self, text: str, strategy: str, new_tokens: int) -> Comparison:
        """Time the answer of plain `generate()` and of the named entry, each after a warm-up.

        An empty prompt, or one too long for the context, raises `OptionError`.
        """
        if not text.strip():
            raise OptionError("the prompt is empty; enter one")
        prompt = Prompt("prompt", "", (text,))
        check_context_length(self.model, prompt.encode(self.tokenizer).shape[1], new_tokens)
        recorder, rounds = Recorder(), list[list[Round]]()
        settings = {"do_sample": False, "streamer": recorder, "pad_token_id": self._pad}
        compared = [
            plain(self.model, settings),
            self._recorded(self.entries[strategy], settings, rounds),
        ]
        plan = Plan(new_tokens, 1, ends=frozenset(end_tokens(self.model)), device=self.model.device)
        others = CpuWatch()
        with without_stored_strategy(self.model):
            [records] = time_contenders(compared, [prompt], self.tokenizer, plan)
        # The first two are warm-ups.
        _, _, *recordings = recorder.recordings
        baseline, ours = (
            recording.lane(record, self.tokenizer)
            for recording, record in zip(recordings, records, strict=True)
        )
        pair, lanes = (records[0], records[1]), (baseline, ours)
        return Comparison(pair, lanes, rounds[-1], self.tokenizer.decode, others.warning())

    def _recorded(
        self, entry: Entry, settings: dict[str, Any], rounds: list[list[Round]]
    ) -> Contender:
        """Return the strategy as a contender that adds the rounds of every run to `rounds`."""

        def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
            mask = torch.ones_like(ids) if mask is None else mask
            inputs = {"input_ids": ids, "attention_mask": mask}
            output, recorded = record_rounds(
                self.model,
                {name: value.to(self.model.device) for name, value in inputs.items()},
                entry.config,
                entry.assistant,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                **settings,
            )
            rounds.append(recorded)
            return Run(output.sequences, output.spec_stats.target_forwards, output.spec_stats)

        return Contender(entry.name, run, ours=True)

    @property
    def _pad(self) -> int:
        # Without a padding token generate() uses the end of a sequence and warns at every call.
        pad = self.model.generation_config.pad_token_id
        return min(end_tokens(self.model), default=0) if pad is None else pad

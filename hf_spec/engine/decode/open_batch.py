"""A continuous batch that requests join and leave while it runs, as a server needs it.

Every request brings its own settings: some draw their tokens, some do not, each with processors and
stop rules of its own. Drafts are those of greedy decoding, so they depend on nobody's draws and one
exact rule judges them all (`NodeDraw`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from hf_spec.common.outputs import RowStats, SpecRequestOutput
from hf_spec.engine.decode.continuous_batching import Prepared, Request, Slots
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.streaming import BatchStreamer


class OpenBatch(Slots):
    """Slots that are filled from outside: before the first `active`, then between two steps of it.

    Drafters begin with the prompts that are there before.

    `on_tokens` gets the id of a request and its newest tokens. `stats.rows` has one entry a slot,
    of the request that it holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        num_slots: int,
        on_tokens: Callable[[str, list[int]], None],
        batching: str = "unpadded",
    ):
        def hand_on(row: int, tokens: list[int]) -> None:
            on_tokens(running[row][0].request_id, tokens)

        # No stop rule holds for all: what ends one request may be a word of another. A processor
        # stands for those that any request may bring.
        anybody = Prepared([None], StopRules([], 1), do_sample=False)
        super().__init__(model, drafter, num_slots, anybody, BatchStreamer(hand_on), batching)
        # Not the batch itself: in a circle, its memory would wait for Python's collector.
        running = self._running

    @property
    def running(self) -> list[str]:
        """The requests that have a slot."""
        return [request.request_id for request, _ in self._running.values()]

    @property
    def num_free(self) -> int:
        """How many more may join now."""
        return self._state.num_rows - len(self._running)

    def add(self, request: Request, prepared: Prepared) -> None:
        """Give a request a free slot; its index becomes that of the slot."""
        row = next(row for row in range(self._state.num_rows) if row not in self._running)
        self._begin(row, replace(request, index=row), prepared)
        if self._verifier is not None:
            self._restart(row)

    def cancel(self, request_id: str) -> SpecRequestOutput | None:
        """Take a request out, as far as it has come; None if it runs no more."""
        for row, (request, _) in self._running.items():
            if request.request_id == request_id:
                self._state.finished[row] = True
                return self._output(row)
        return None

    def _refill(self, free: Sequence[int]) -> None:
        """Who comes next is said from outside."""

    def _output(self, row: int) -> SpecRequestOutput:
        output = super()._output(row)
        self.stats.rows[row] = RowStats()
        # Rows that go on are judged faster where nobody has processors.
        self._processors.begin(row, [])
        return output

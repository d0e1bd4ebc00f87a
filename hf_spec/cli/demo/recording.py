"""When the tokens of a timed generation came, so that it can be shown afterwards as it was.

A text that is drawn while it is generated would take processor time from what is measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_spec.bench.contenders import Contender, Run
from hf_spec.decoding.streaming import BatchTextStreamer


@dataclass(frozen=True)
class Block:
    """Tokens that came together.

    Attributes:
        seconds: Since the call of `generate()`.
        token_ids: At least one; of a speculative round the accepted drafts, then the target's own.
    """

    seconds: float
    token_ids: list[int]


@dataclass(frozen=True)
class Piece:
    """Text that appeared at once.

    Attributes:
        seconds: Since the call of `generate()`.
        text: What appeared.
        drafted: Whether it was drafted and accepted.
    """

    seconds: float
    text: str
    drafted: bool


@dataclass(frozen=True)
class Recording:
    """One generation.

    Attributes:
        seconds: Of the whole call.
        prompt_ids: Tokens of the prompt.
        blocks: New tokens as they came.
    """

    seconds: float
    prompt_ids: list[int]
    blocks: list[Block]

    @property
    def token_ids(self) -> list[int]:
        """All new tokens."""
        return [token for block in self.blocks for token in block.token_ids]

    def pieces(self, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
        """Return the text, piece by piece; together it is what the tokenizer makes of it."""
        pieces: list[Piece] = []
        arrived: list[str] = []
        streamer = BatchTextStreamer(
            tokenizer, lambda row, text, ended: arrived.append(text), skip_special_tokens=True
        )
        for block in self.blocks:
            for drafted, part in ((True, block.token_ids[:-1]), (False, block.token_ids[-1:])):
                if part:
                    streamer.put_row(0, part)
                    pieces.append(Piece(block.seconds, "".join(arrived), drafted))
                    arrived.clear()
        streamer.end_row(0)
        pieces.append(Piece(self.seconds, "".join(arrived), False))
        return [piece for piece in pieces if piece.text]


class Recorder(BaseStreamer):
    """A streamer that records every generation of the contenders it watches.

    Attributes:
        latest: The last recording by the contender's name.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Recording] = {}
        self._started = 0.0
        self._prompt_ids: list[int] | None = None
        self._blocks: list[Block] = []

    def watch(self, contender: Contender) -> Contender:
        """Return the contender, recorded whenever it runs; this must be its streamer."""

        def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
            self._prompt_ids, self._blocks = None, []
            self._started = time.perf_counter()
            finished = contender.run(ids, new_tokens, mask)
            seconds = time.perf_counter() - self._started
            self.latest[contender.name] = Recording(seconds, self._prompt_ids or [], self._blocks)
            return finished

        return replace(contender, run=run)

    def put(self, value: Tensor) -> None:
        """Receive tokens; `generate()` hands on the prompt first."""
        token_ids = value.flatten().tolist()
        if self._prompt_ids is None:
            self._prompt_ids = token_ids
        else:
            self._blocks.append(Block(time.perf_counter() - self._started, token_ids))

    def end(self) -> None:
        """Nothing is held back."""

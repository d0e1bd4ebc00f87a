"""Streaming of several sequences: whole characters, complete texts, and one end per sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import MaxLengthCriteria, PreTrainedTokenizerFast, TextStreamer
from transformers.generation import EosTokenCriteria

from hf_spec import BatchStreamer, BatchTextStreamer, UnsupportedError
from hf_spec.engine.decode.stopping import StopRules
from tests import tiny_models
from tests.row_states import commit, make_state
from tests.tiers import FEW_STRATEGIES


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte; characters outside ASCII take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that decodes words with spaces between them; a single word has none."""
    words = ["<end>", "the", "cat", "sat", "on", "a", "mat"]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


class Heard:
    """Text received from a streamer, by sequence."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}
        self.ended: list[int] = []

    def __call__(self, row: int, text: str, ended: bool) -> None:
        assert row not in self.ended
        assert text or ended
        self.pieces.setdefault(row, []).append(text)
        if ended:
            self.ended.append(row)

    def text(self, row: int) -> str:
        return "".join(self.pieces[row])


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_characters_come_whole_and_texts_add_up(block: int) -> None:
    tokenizer, heard = byte_tokenizer(), Heard()
    texts = ["naïve – 東京 🙂 ok", "plain words\nand a line"]
    streamer = BatchTextStreamer(tokenizer, heard)
    for row, text in enumerate(texts):
        ids = tokenizer(text).input_ids
        assert row or len(ids) > len(text)
        for start in range(0, len(ids), block):
            streamer.put_row(row, ids[start : start + block])
        assert all("\ufffd" not in piece for piece in heard.pieces.get(row, []))
        assert row not in heard.ended
        streamer.end_row(row)
        assert heard.text(row) == text == tokenizer.decode(ids)
    assert heard.ended == [0, 1]


@pytest.mark.parametrize("block", [1, 2])
def test_spaces_between_words_are_kept(block: int) -> None:
    tokenizer, heard = word_tokenizer(), Heard()
    streamer = BatchTextStreamer(tokenizer, heard, skip_special_tokens=True)
    ids = [1, 2, 3, 4, 1, 6, 0]
    for start in range(0, len(ids), block):
        streamer.put_row(7, ids[start : start + block])
    streamer.end_row(7)
    assert heard.text(7) == "the cat sat on the mat" == tokenizer.decode(ids[:-1])


def test_interleaved_sequences_do_not_mix() -> None:
    tokenizer, heard = byte_tokenizer(), Heard()
    streamer = BatchTextStreamer(tokenizer, heard)
    texts = {3: "äöü", 1: "éèê"}
    ids = {row: tokenizer(text).input_ids for row, text in texts.items()}
    for position in range(6):
        for row in texts:
            streamer.put_row(row, ids[row][position : position + 1])
    assert {row: heard.text(row) for row in texts} == texts


def test_what_is_no_character_comes_at_the_end() -> None:
    tokenizer, heard = byte_tokenizer(), Heard()
    streamer = BatchTextStreamer(tokenizer, heard)
    streamer.put_row(0, tokenizer("ok é").input_ids[:-1])
    assert heard.pieces == {}, "a block that ends within a character waits for the rest"
    streamer.end_row(0)
    assert heard.text(0) == "ok \ufffd"


def test_a_sequence_without_a_token_ends_too() -> None:
    heard = Heard()
    BatchTextStreamer(byte_tokenizer(), heard).end_row(4)
    assert heard.pieces == {4: [""]}
    assert heard.ended == [4]


def test_functions_are_called_with_the_sequence() -> None:
    tokens: list[tuple[int, list[int]]] = []
    ends: list[int] = []
    streamer = BatchStreamer(lambda *args: tokens.append(args), ends.append)
    state = make_state(MaxLengthCriteria(20), EosTokenCriteria(12), streamer=streamer)
    commit(state, [5, 6], [3, 4])
    commit(state, [12], [12])
    state.begin(1, 9, [7], StopRules([EosTokenCriteria(12)], 1))
    commit(state, [], [8, 12])
    assert tokens == [(0, [5, 6]), (1, [3, 4]), (0, [12]), (1, [12]), (9, [8, 12])]
    assert ends == [0, 1, 9]


def batch_call(name: str, streamer: Any, **options: Any) -> Any:
    return tiny_models.build(name).generate(
        **tiny_models.prompts(name, "ragged"),
        max_new_tokens=12,
        do_sample=False,
        streamer=streamer,
        **options,
    )


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
def test_a_batch_is_streamed_while_it_grows(strategy: str) -> None:
    name = "gemma3"
    rows: dict[int, list[int]] = {}
    ends: list[int] = []
    streamer = BatchStreamer(lambda row, new: rows.setdefault(row, []).extend(new), ends.append)
    eos = batch_call(name, None)[:, -12:][[0, 2], [5, 3]].tolist()
    output = batch_call(name, streamer, eos_token_id=eos, **tiny_models.speculation(name, strategy))
    width = tiny_models.prompts(name, "ragged")["input_ids"].shape[1]
    for row, sequence in enumerate(output[:, width:].tolist()):
        length = next((i + 1 for i, token in enumerate(sequence) if token in eos), len(sequence))
        assert rows[row] == sequence[:length]
    assert sorted(ends) == list(range(len(output)))
    assert len({len(row) for row in rows.values()}) > 1


def test_a_batch_is_streamed_as_text() -> None:
    heard, tokenizer = Heard(), tiny_models.tokenizer()
    output = batch_call("llama", BatchTextStreamer(tokenizer, heard), spec_strategy="lookup")
    width = tiny_models.prompts("llama", "ragged")["input_ids"].shape[1]
    texts = tokenizer.batch_decode(output[:, width:])
    assert [heard.text(row) for row in range(len(texts))] == texts
    assert max(len(pieces) for pieces in heard.pieces.values()) > 2


def test_one_sequence_may_have_a_batch_streamer() -> None:
    tokens: list[int] = []
    prompt = tiny_models.repetitive_prompt()
    output = tiny_models.build("llama").generate(
        prompt,
        max_new_tokens=8,
        spec_strategy="lookup",
        streamer=BatchStreamer(lambda row, new: tokens.extend(new)),
    )
    assert output[0, prompt.shape[1] :].tolist() == tokens


def test_a_streamer_of_one_sequence_is_refused_for_several() -> None:
    streamer = TextStreamer(tiny_models.tokenizer())
    # `generate()` passes the batch to it first, for which TextStreamer would raise an error.
    streamer.put = lambda value: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"TextStreamer follows one.*BatchTextStreamer"):
        batch_call("llama", streamer, spec_strategy="lookup")


def test_plain_generate_cannot_feed_a_batch_streamer() -> None:
    with pytest.raises(UnsupportedError, match="BatchStreamer needs a spec_strategy"):
        batch_call("llama", BatchStreamer(lambda row, tokens: None))


def test_the_end_of_everything_is_heard() -> None:
    class Closed(BatchStreamer):
        closed = 0

        def end(self) -> None:
            self.closed += 1

    streamer = Closed(lambda row, tokens: None)
    batch_call("llama", streamer, spec_strategy="none")
    assert streamer.closed == 1
    assert torch.is_tensor(batch_call("llama", None, spec_strategy="none"))

"""Logits processors have the same effect inside a draft tree as in plain generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as hf

from hf_spec import DraftConfig, LookupConfig, OptionError, TreeConfig, UnsupportedError
from hf_spec.engine.decode.logits_processors import (
    UNSUPPORTED,
    NodeProcessors,
    RowProcessors,
    check_processors,
)
from tests.fake_gpu import OnGpu, pretended
from tests.targets import whisper_cases
from tests.tiny_models import (
    STRATEGIES,
    VOCAB,
    build,
    prompts,
    ragged_batch,
    repetitive_prompt,
    speculation,
    tokenizer,
)

NEW_TOKENS = 14
# Hashing key of a watermark with which plain generate() fails as well.
FAILING_KEY = 4


def arguments(strategy: str) -> dict[str, Any]:
    if strategy == "lookup":
        return {"spec_strategy": LookupConfig(max_matches=3)}
    # A draft model with a high acceptance rate, so that deep nodes of the tree are visited.
    return {"spec_strategy": TreeConfig(children=2), "assistant": build("llama")}


def inputs(batch: str) -> dict[str, Tensor]:
    if batch == "ragged":
        return ragged_batch()
    prompt = repetitive_prompt()
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def odd_rows_stay_even(row: int, prefix: Tensor) -> list[int]:
    """Return the tokens allowed for a batch row after its last token."""
    return list(range((row + int(prefix[-1])) % 2, VOCAB, 2))


# Every setting from which generate() builds a processor for greedy decoding.
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[59], [76, 25], [61, 9, 34]]},
    "min_length": {"min_length": 20, "eos_token_id": [2, 25, 77, 8, 34]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": [2, 25, 77, 8, 34]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": odd_rows_stay_even},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 2},
    "suppress_tokens": {"suppress_tokens": list(range(3, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "sequence_bias": {"sequence_bias": [[[8], 3.0], [[8, 9], 9.0], [[9, 10], 9.0]]},
    "watermark_left": {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "watermark_self": {
        "watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash")
    },
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            keys=[3, 14, 15], ngram_len=3, context_history_size=64, sampling_table_size=1024
        )
    },
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [4, 5],
        "min_new_tokens": 9,
        "eos_token_id": 31,
        "prefix_allowed_tokens_fn": odd_rows_stay_even,
    },
}

# These act on scores that the tiny model never produces.
IDLE = {"renormalize_logits", "remove_invalid_values"}

# Settings that only sampling uses.
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "top_h": {"top_h": 0.4},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
}


@pytest.mark.by_default(batch=("ragged",), strategy=("tree",))
@pytest.mark.parametrize("batch", ["one", "ragged"])
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_output_is_that_of_plain_generate(name: str, strategy: str, batch: str) -> None:
    model = build("llama")
    call = {**inputs(batch), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **SETTINGS[name]}
    plain = model.generate(**call)
    drafted = model.generate(**call, **arguments(strategy))
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - IDLE))
def test_the_settings_change_the_output(name: str) -> None:
    """Otherwise the test above would pass without any processors."""
    changed = []
    for batch in ("one", "ragged"):
        call = {**inputs(batch), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        without = build("llama").generate(**call, eos_token_id=SETTINGS[name].get("eos_token_id"))
        changed.append(not torch.equal(build("llama").generate(**call, **SETTINGS[name]), without))
    assert any(changed)


@pytest.mark.by_default(batch=("ragged",))
@pytest.mark.parametrize("batch", ["one", "ragged"])
@pytest.mark.parametrize("name", WARPERS)
def test_scores_of_sampling_are_those_of_plain_generate(name: str, batch: str) -> None:
    """The warped scores of every step match on the prefixes that speculative sampling visited."""
    model = build("llama")
    torch.manual_seed(3)
    call = {**inputs(batch), "do_sample": True, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    call |= {"top_k": 0, **WARPERS[name], "return_dict_in_generate": True, "output_scores": True}
    drafted = model.generate(**call, **arguments("lookup"))
    new = drafted.sequences[:, call["input_ids"].shape[1] :]

    class Follow(LogitsProcessor):
        """Processor that records scores and makes plain generate() follow the drafted output."""

        def __init__(self) -> None:
            self.scores: list[Tensor] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.scores.append(scores.clone())
            step = new[:, len(self.scores) - 1]
            return torch.full_like(scores, -torch.inf).scatter(1, step[:, None], 0.0)

    follow = Follow()
    original = model._get_logits_processor

    def with_follower(**kwargs: Any) -> Any:
        return hf.LogitsProcessorList([*original(**kwargs), follow])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_get_logits_processor", with_follower)
        plain = model.generate(**call)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert len(drafted.scores) == len(follow.scores)
    for ours, theirs in zip(drafted.scores, follow.scores, strict=True):
        assert torch.equal(ours.isinf(), theirs.isinf())
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


class Stateless(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, dims=-1) - 0.1 * (input_ids[:, -1:] % 7)


class CountsCalls(LogitsProcessor):
    """Processor that bans tokens depending on its number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 3 :: 3] = -torch.inf
        return scores


class RemembersTokens(LogitsProcessor):
    """Processor that stores each row's newest token in every call and bans all stored tokens."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.zeros_like(scores, dtype=torch.bool)
        self.seen.scatter_(1, input_ids[:, -1:], True)
        return scores.masked_fill(self.seen, -torch.inf)


class BansByRow(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(scores.shape[0]):
            scores[row, row::5] = -torch.inf
        return scores


class WritesInPlace(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores.neg_()
        input_ids.fill_(0)
        return scores


class LooksAtLength(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] % 2 else -scores


class ClaimsContinuousBatching(LogitsProcessor):
    """Processor with a flag for transformers' continuous batching, which implies nothing here."""

    supports_continuous_batching = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -2:], -torch.inf)


class HotterTemperature(hf.TemperatureLogitsWarper):
    """Subclass of a known prefix-free class that does read the prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids, -torch.inf)


def a_function(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.scatter(1, input_ids[:, -3:], -torch.inf)


USER_WRITTEN = [
    Stateless,
    CountsCalls,
    RemembersTokens,
    BansByRow,
    LooksAtLength,
    ClaimsContinuousBatching,
    lambda: HotterTemperature(2.0),
    lambda: a_function,
]


@pytest.mark.by_default(batch=("ragged",))
@pytest.mark.parametrize("batch", ["one", "ragged"])
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
@pytest.mark.parametrize("make", USER_WRITTEN)
def test_user_written_processors(make: Any, strategy: str, batch: str) -> None:
    model = build("llama")
    call = {**inputs(batch), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    # Between two processors of transformers; the order must be kept.
    call |= {"repetition_penalty": 1.1, "renormalize_logits": True}
    plain = model.generate(**call, logits_processor=[make()])
    drafted = model.generate(**call, logits_processor=[make()], **arguments(strategy))
    assert torch.equal(drafted, plain)
    assert not torch.equal(plain, model.generate(**call))


class Lengths(hf.LogitsProcessor):
    """Notes the length of each step, for `Banned`."""

    length = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.length = input_ids.shape[1]
        return scores


class Banned(hf.LogitsProcessor):
    """Fails unless `Lengths` was called in the same step; bans tokens of that length."""

    def __init__(self, lengths: Lengths):
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.lengths.length == input_ids.shape[1]
        scores[:, self.lengths.length % 7 :: 7] = -torch.inf
        return scores


def linked() -> list[Any]:
    lengths = Lengths()
    return [lengths, Banned(lengths)]


class Guidance(hf.LogitsProcessor):
    """The second row guides all others."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 1.5 * (scores - scores[1:2])


class Grammar(hf.LogitsProcessor):
    """A state per row, which advances with each call and fails for any other text."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        texts = input_ids.tolist()
        if self.texts:
            assert [text[:-1] for text in texts] == self.texts
        self.texts = texts
        for row, text in enumerate(texts):
            scores[row, (text[-1] + row) % 5 :: 5] = -torch.inf
        return scores


class TestWholeBatch:
    """Processors of a user are called as plain `generate()` calls them."""

    @pytest.mark.by_default(strategy=("draft",))
    @pytest.mark.parametrize("strategy", ["none", "lookup", "draft", "tree"])
    @pytest.mark.parametrize("ends", [False, True], ids=["", "ends"])
    @pytest.mark.parametrize(
        "make", [linked, lambda: [Guidance()], lambda: [Grammar()]], ids=["linked", "guided", "own"]
    )
    def test_rows_may_depend_on_each_other(self, make: Any, ends: bool, strategy: str) -> None:
        model = build("llama")
        call = {**inputs("ragged"), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        plain = model.generate(**call, logits_processor=make())
        if ends:
            width = call["input_ids"].shape[1]
            call["eos_token_id"] = int(plain[0, width + 4])
            plain = model.generate(**call, logits_processor=make())
        choice: dict[str, Any] = {"spec_strategy": strategy}
        if strategy in ("draft", "tree"):
            config = DraftConfig if strategy == "draft" else TreeConfig
            choice["spec_strategy"] = config(max_draft_tokens=3, length_policy="static")
            choice["assistant"] = build("llama")
        drafted = model.generate(**call, logits_processor=make(), **choice)
        assert torch.equal(drafted, plain)

    def test_drafts_of_all_rows_are_accepted_together(self) -> None:
        seen: list[list[list[int]]] = []

        def watch(input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(input_ids.tolist())
            return scores

        model = build("llama")
        call = {**inputs("ragged"), "max_new_tokens": 8, "pad_token_id": 0}
        call["logits_processor"] = [watch]
        model.generate(**call)
        plain, seen = seen, []
        static = DraftConfig(max_draft_tokens=3, length_policy="static")
        more = {"spec_strategy": static, "assistant": build("llama")}
        found = model.generate(**call, **more, return_dict_in_generate=True)
        assert seen == plain
        assert found.spec_stats.target_forwards <= 3


class TestAfterTheStop:
    """Code of a user is not called for tokens after a stop string."""

    def call(self) -> tuple[dict[str, Any], list[int], int]:
        model, words, prompt = build("llama"), tokenizer(), inputs("one")
        begin = prompt["input_ids"].shape[1]
        last = model.generate(**prompt, max_new_tokens=6)[0, -1:]
        call = {**prompt, "stop_strings": [words.decode(last)], "tokenizer": words}
        call["max_new_tokens"] = 30
        answer = model.generate(**call)[0].tolist()
        assert len(answer) > begin + 1
        draft = DraftConfig(max_draft_tokens=8, length_policy="static")
        return {**call, "spec_strategy": draft, "assistant": model}, answer, begin

    def test_a_trie_of_allowed_answers(self) -> None:
        call, answer, begin = self.call()
        trie = {tuple(answer[:end]): [answer[end]] for end in range(begin, len(answer))}
        found = build("llama").generate(
            **call, prefix_allowed_tokens_fn=lambda row, ids: trie[tuple(ids.tolist())]
        )
        assert found[0].tolist() == answer

    def test_a_processor(self) -> None:
        call, answer, _ = self.call()

        def ends(input_ids: Tensor, scores: Tensor) -> Tensor:
            assert input_ids.shape[1] < len(answer)
            return scores

        assert build("llama").generate(**call, logits_processor=[ends])[0].tolist() == answer


@pytest.mark.parametrize("batch", ["one", "ragged"])
def test_a_processor_that_writes_into_its_arguments(batch: str) -> None:
    """Changes of scores take effect; changes of input_ids are not visible elsewhere."""
    model = build("llama")
    call = {**inputs(batch), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    drafted = model.generate(**call, logits_processor=[WritesInPlace()], **arguments("lookup"))
    plain = model.generate(**call, logits_processor=[lambda ids, scores: -scores])
    assert torch.equal(drafted, plain)


def test_a_constraint_is_not_asked_what_follows_an_end_of_sequence() -> None:
    """A grammar is undefined there, and plain generate() does not call it at batch size 1."""
    model = build("llama")
    prompt = inputs("one")
    eos = int(model.generate(**prompt, max_new_tokens=4)[0, -1])

    def allowed(row: int, prefix: Tensor) -> list[int]:
        return [] if eos in prefix[21:] else list(range(VOCAB))

    call = {**prompt, "max_new_tokens": 9, "eos_token_id": eos, "pad_token_id": 0}
    plain = model.generate(**call, prefix_allowed_tokens_fn=allowed)
    for strategy in ("lookup", "tree"):
        drafted = model.generate(**call, prefix_allowed_tokens_fn=allowed, **arguments(strategy))
        assert torch.equal(drafted, plain)


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_one_prompt_serves_the_rows_that_num_return_sequences_makes_of_it(name: str) -> None:
    batch = ragged_batch((6, 4))
    call = {**batch, "max_new_tokens": 8, "pad_token_id": 0, "top_k": 1, "do_sample": True}
    call |= {"num_return_sequences": 3, **SETTINGS[name]}
    model = build("llama")
    assert torch.equal(model.generate(**call, **arguments("lookup")), model.generate(**call))


@pytest.mark.parametrize("offset", [1, 2], ids=["scores", "a forward of its own"])
def test_silence_is_looked_for_in_the_first_step_of_the_whole_batch(offset: int) -> None:
    """The draft has three tokens; the detector must see none of them."""
    probabilities = []
    for options in ({}, {"spec_strategy": "lookup"}):
        begin = torch.tensor([[whisper_cases.START, 9]]).expand(3, -1)
        detector = hf.WhisperNoSpeechDetection(whisper_cases.NO_TIMESTAMPS - 1, begin_index=offset)
        detector.set_model(whisper_cases.build())
        sound = whisper_cases.sound(3)
        detector.set_inputs({"inputs": sound, "input_ids": begin})
        detector.set_begin_index(2)
        GenerationMixin.generate(
            whisper_cases.build(),
            sound,
            decoder_input_ids=begin,
            logits_processor=[detector],
            do_sample=False,
            max_new_tokens=12,
            **options,
        )
        probabilities.append(detector.no_speech_prob)
    assert len(set(probabilities[0].tolist())) == 3
    torch.testing.assert_close(*probabilities, atol=1e-6, rtol=1e-4)


class TestRefusals:
    def refuse(self, error: type[Exception], match: str, batch: str = "one", **call: Any) -> None:
        with pytest.raises(error, match=match):
            build("llama").generate(
                **inputs(batch), max_new_tokens=4, pad_token_id=0, spec_strategy="lookup", **call
            )

    def test_guidance(self) -> None:
        self.refuse(UnsupportedError, "guidance_scale=1.5 runs a second", guidance_scale=1.5)

    @pytest.mark.parametrize("kind", UNSUPPORTED)
    def test_classes_that_couple_rows_or_run_the_model(self, kind: type) -> None:
        processor = kind.__new__(kind)
        with pytest.raises(UnsupportedError, match=f"{kind.__name__} cannot be used"):
            check_processors([processor], 1)
        subclass = type("Mine", (kind,), {})
        with pytest.raises(UnsupportedError, match="Mine cannot be used"):
            check_processors([subclass.__new__(subclass)], 1)

    def test_rows_of_another_batch(self) -> None:
        penalty = hf.RepetitionPenaltyLogitsProcessor(1.2)
        penalty.prompt_ignore_length = torch.zeros(3, dtype=torch.long)
        self.refuse(
            UnsupportedError, "stores 3 rows for a batch of 5", "ragged", logits_processor=[penalty]
        )

    @pytest.mark.parametrize("odd", [7, "ban", None, lambda ids, scores, length: scores])
    def test_what_cannot_be_called_with_ids_and_scores(self, odd: Any) -> None:
        if callable(odd):
            # transformers looks at __call__, which hides the signature of a function.
            odd = type("Three", (LogitsProcessor,), {"__call__": lambda s, i, c, length: c})()
        self.refuse(OptionError, "cannot be called with", logits_processor=[odd])


@pytest.mark.parametrize("first", [[], [hf.SuppressTokensLogitsProcessor([5, 7])]])
@pytest.mark.parametrize(
    "warper",
    [
        hf.TemperatureLogitsWarper(0.6),
        hf.TopKLogitsWarper(4),
        hf.TopPLogitsWarper(0.7),
        hf.TopHLogitsWarper(0.4),
        hf.MinPLogitsWarper(0.1),
        hf.TypicalLogitsWarper(0.6),
        hf.EpsilonLogitsWarper(0.05),
        hf.EtaLogitsWarper(0.1),
        hf.InfNanRemoveLogitsProcessor(),
        hf.LogitNormalization(),
    ],
    ids=lambda warper: type(warper).__name__ if isinstance(warper, LogitsProcessor) else "",
)
def test_where_few_tokens_are_possible_the_others_are_left_out(warper: Any, first: Any) -> None:
    """Results are the same; only a processor that uses token ids gets the scores of all tokens."""
    wanted = torch.arange(1, VOCAB, 3)
    scores = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    scores = torch.full_like(scores, -torch.inf).index_copy(1, wanted, scores[:, wanted])
    process = NodeProcessors([*first, warper], 2)
    assert process.reads_tokens == bool(first)
    expected = process([0, 1], None, scores.clone()).softmax(dim=-1)
    given = scores if first else scores[:, wanted]
    found = process([0, 1], None, given.clone(), wanted)
    assert found.shape == (2, len(wanted))
    torch.testing.assert_close(found.softmax(dim=-1), expected[:, wanted])


def raised(row: int, error: Exception) -> None:
    """Raise `error`: no row of these tests may fail."""
    raise error


class TestRowProcessors:
    """Rows with their own processor lists, which change while the batch runs."""

    def test_each_row_has_the_processors_of_its_sequence(self) -> None:
        lists = RowProcessors(2, raised)
        every = NodeProcessors([lists], 2)
        assert not every.reads_prefix
        assert every.is_identity
        lists.begin(0, [hf.TemperatureLogitsWarper(2.0)])
        lists.begin(1, [hf.MinLengthLogitsProcessor(3, [4])])
        assert every.reads_prefix, "what was made before knows of it"
        assert not every.is_identity
        scores = torch.ones(3, 6)
        prefixes = [torch.tensor(prefix) for prefix in ([1, 2], [1], [1, 2, 3])]
        found = every([0, 1, 1], prefixes, scores.clone())
        assert found[0].tolist() == [0.5] * 6
        assert found[1].tolist() == [1, 1, 1, 1, -torch.inf, 1]
        assert found[2].tolist() == [1] * 6
        lists.begin(1, [])
        assert every([1], [prefixes[1]], scores[:1].clone()).tolist() == [[1] * 6]
        lists.begin(0, [])
        assert every.is_identity

    def test_classes_that_remember_begin_again(self) -> None:
        class Counting(hf.LogitsProcessor):
            calls = 0

            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                self.calls += 1
                return scores + self.calls

        mine, lists = Counting(), RowProcessors(2, raised)
        every = NodeProcessors([lists], 2)
        drafts = NodeProcessors([lists], 2, stateless_only=True)
        for _ in range(2):
            lists.begin(0, [mine])
            lists.begin(1, [mine])
            for call in (1.0, 2.0):
                found = every([0, 1], [torch.tensor([3])] * 2, torch.zeros(2, 2))
                assert found.tolist() == [[call, call]] * 2
        assert mine.calls == 0
        assert drafts([0], [torch.tensor([3])], torch.zeros(1, 2)).tolist() == [[0, 0]]

    def test_an_error_is_reported_and_leaves_the_other_rows_alone(self) -> None:
        class Failing(hf.LogitsProcessor):
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                raise LookupError("no such token")

        errors: list[tuple[int, str]] = []
        lists = RowProcessors(2, lambda row, error: errors.append((row, str(error))))
        lists.begin(0, [hf.TemperatureLogitsWarper(2.0), hf.SuppressTokensLogitsProcessor([9])])
        lists.begin(1, [Failing()])
        prefixes = [torch.tensor([1])] * 3
        found = NodeProcessors([lists], 2)([0, 1, 0], prefixes, torch.ones(3, 4))
        assert found.tolist() == [[0.5] * 4, [1] * 4, [0.5] * 4]
        assert errors == [(1, "no such token")]
        drafts = NodeProcessors([lists], 2, stateless_only=True)
        assert drafts([0, 1], prefixes[:2], torch.ones(2, 4))[0].tolist() == [0.5] * 4
        assert len(errors) == 1, "draft scores end no row"

    def test_filters_of_all_rows_run_in_one_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lists = RowProcessors(3, raised)
        lists.begin(0, [hf.TemperatureLogitsWarper(2.0), hf.TopKLogitsWarper(2)])
        lists.begin(1, [hf.TopPLogitsWarper(0.5)])
        every, rows = NodeProcessors([lists], 3), [0, 1, 2, 1]
        scores = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))
        expected = every(rows, [], scores.clone())
        with pretended(monkeypatch) as gpu:
            found = every(rows, [], OnGpu(scores.clone()))
            assert gpu.launches == 1
            assert not gpu.waits
            torch.testing.assert_close(found.cpu(), expected)

    def test_what_cannot_be_copied_is_refused(self) -> None:
        class Unique:
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                return scores

            def __deepcopy__(self, memo: object) -> None:
                raise TypeError("there is only one")

        with pytest.raises(UnsupportedError, match=r"Unique cannot be copied.*several sequences"):
            RowProcessors(1, raised).begin(0, [Unique()])


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_watermark_that_raises_an_error_on_some_scores(strategy: str) -> None:
    """Here the draft model's scores cause the error; the target's scores never do."""

    def generate(key: int, **more: Any) -> list[list[int]]:
        mark = WatermarkingConfig(
            bias=2.5, seeding_scheme="selfhash", greenlist_ratio=0.1, hashing_key=key
        )
        call = {**prompts("llama", "one"), "max_new_tokens": NEW_TOKENS + 2}
        return build("llama").generate(**call, watermarking_config=mark, **more).tolist()

    choice = speculation("llama", strategy)
    assert generate(3, **choice) == generate(3)
    assert generate(3) != generate(1)
    # If the target's own scores cause the error, it is the same as in plain generate().
    for more in ({}, choice):
        with pytest.raises(IndexError, match="tensors used as indices"):
            generate(FAILING_KEY, **more)

"""Models with recurrent layers, as target and draft model: the same tokens as plain `generate()`.

Recurrent states cannot be rolled back. The tests also plant mistakes in the handling of states and
check that the tokens change.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

import hf_spec
from hf_spec.common.compat import CACHE_NAME, cache_argument
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.common.outputs import SpecStats
from hf_spec.engine.models.recurrent_layers import COMMITTED, Mixer, mixers_of
from hf_spec.engine.models.recurrent_state import RecurrentMixers
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.sdsat.gated_lora import GatedLora
from tests import hybrid_models, test_distribution
from tests.hybrid_models import DELTA_NETS, HYBRIDS, MAMBA_1, PURE, build, noisy_copy, speculate
from tests.model_watch import snapshot
from tests.refusals import refuse
from tests.targets.cases import assert_same_up_to_ties
from tests.tiny_models import random_adaptive_tokens, wide_tree

ONE, RAGGED = (23,), (23, 9, 2)
NEW_TOKENS = {ONE: 40, RAGGED: 16}
# A delta net, a short convolution, and Mamba-2 with attention in every layer.
THREE = ("qwen3_5_text", "lfm2", "falcon_h1")
# Other models that also run with a noisy copy of themselves as draft model.
TREES_ALONE = ("jamba", "zamba2", "mamba2")
RESUMED = (*THREE, "bamba")
STRATEGIES = ("lookup", "draft", "tree", "gsd")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def plain(name: str, lengths: tuple[int, ...]) -> Tensor:
    given = hybrid_models.inputs(lengths)
    return build(name).generate(**given, max_new_tokens=NEW_TOKENS[lengths], do_sample=False)


def assert_plain(name: str, lengths: tuple[int, ...], got: Tensor) -> None:
    """Check that tokens are equal; for delta nets, up to ties of the two largest logits."""
    expected = plain(name, lengths)
    if name not in DELTA_NETS:
        assert got.tolist() == expected.tolist()
        return
    given = hybrid_models.inputs(lengths)
    for row, mask in enumerate(given["attention_mask"]):
        start = int((mask == 0).sum())
        prompt = given["input_ids"][row : row + 1, start:]
        texts = (expected[row, start:].tolist(), got[row, start:].tolist())
        assert_same_up_to_ties(build(name), prompt, *texts)


def guessed(name: str, lengths: tuple[int, ...], branches: bool) -> Any:
    given = hybrid_models.inputs(lengths)
    return speculate(build(name), given, plain(name, lengths), branches)


@pytest.mark.by_default(branches=(True,), name=(*THREE, "mamba", "mamba2", "jamba"))
@pytest.mark.parametrize("branches", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_output_is_that_of_plain_generate(name: str, branches: bool) -> None:
    model = build(name)
    before = snapshot(model)
    for lengths in (ONE, RAGGED):
        output = guessed(name, lengths, branches)
        assert_plain(name, lengths, output.sequences)
        assert 0 < output.spec_stats.accepted_tokens < output.spec_stats.drafted_tokens
    assert snapshot(model) == before


@pytest.mark.by_default(name=(*THREE, "mamba", "mamba2", "jamba"))
@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_compared_varies(name: str) -> None:
    outputs = [plain(name, lengths)[:, lengths[0] :].flatten() for lengths in (ONE, RAGGED)]
    assert len(set(torch.cat(outputs).tolist())) >= 20


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", THREE)
def test_strategies(name: str, strategy: str) -> None:
    assistant = None if strategy == "lookup" else noisy_copy(name)
    output = build(name).generate(
        **hybrid_models.inputs(RAGGED),
        max_new_tokens=NEW_TOKENS[RAGGED],
        do_sample=False,
        spec_strategy=strategy,
        assistant=assistant,
        return_dict_in_generate=True,
    )
    assert_plain(name, RAGGED, output.sequences)
    assert strategy == "lookup" or output.spec_stats.accepted_tokens > 0


@pytest.mark.by_default(name=("mamba2",))
@pytest.mark.parametrize("name", TREES_ALONE)
def test_other_models_draft_for_themselves(name: str) -> None:
    output = build(name).generate(
        **hybrid_models.inputs(RAGGED),
        max_new_tokens=NEW_TOKENS[RAGGED],
        do_sample=False,
        spec_strategy="tree",
        assistant=noisy_copy(name),
    )
    assert_plain(name, RAGGED, output)


@pytest.mark.parametrize("batching", ["unpadded_kv", "unpadded_input", "padded"])
def test_padding_reaches_no_state(batching: str) -> None:
    output = build("falcon_h1").generate(
        **hybrid_models.inputs(RAGGED),
        max_new_tokens=NEW_TOKENS[RAGGED],
        do_sample=False,
        spec_strategy=hf_spec.TreeConfig(batching=batching),
        assistant=noisy_copy("falcon_h1"),
    )
    assert_plain("falcon_h1", RAGGED, output)


def in_slots(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the answers to five prompts in two slots, and to each prompt alone."""
    lengths = (9, 4, 14, 1, 11)
    given = hybrid_models.inputs(lengths)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*given.values(), strict=True)]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    alone = [build(name).generate(torch.tensor([p]), **options)[0, len(p) :] for p in prompts]
    found = build(name).generate_batch(
        prompts, spec_strategy="tree", assistant=noisy_copy(name), max_batch=2, **options
    )
    return [output.generated_tokens for output in found.values()], [
        tokens.tolist() for tokens in alone
    ]


@pytest.mark.by_default(name=("qwen3_5_text", "mamba"))
@pytest.mark.parametrize("name", [*THREE, "mamba"])
def test_prompts_follow_each_other_in_the_slots(name: str) -> None:
    found, alone = in_slots(name)
    assert found == alone


def conversation(name: str, **options: Any) -> tuple[Tensor, DynamicCache]:
    """Make a second call with more text on the cache of the first, as in a chat."""
    model, given = build(name), hybrid_models.inputs(RAGGED)
    cache = DynamicCache(config=model.config)
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **options}
    first = model.generate(**given, **{CACHE_NAME: cache}, **call)
    text = torch.cat([first, torch.tensor([[5, 6, 7, 8]] * len(RAGGED))], dim=1)
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 16), value=1)
    return model.generate(text, attention_mask=mask, **{CACHE_NAME: cache}, **call), cache


@pytest.mark.smoke
@pytest.mark.by_default(name=("qwen3_5_text", "lfm2"))
@pytest.mark.parametrize("name", RESUMED)
def test_a_cache_is_resumed_and_handed_back(name: str) -> None:
    expected, theirs = conversation(name)
    found, ours = conversation(name, spec_strategy="draft", assistant=noisy_copy(name))
    assert found.tolist() == expected.tolist()
    for our, their in zip(ours.layers, theirs.layers, strict=True):
        assert type(our) is type(their)
        for kind in ("conv_states", "recurrent_states"):
            mine, plain_one = (getattr(layer, kind, {0: None})[0] for layer in (our, their))
            assert (mine is None) == (plain_one is None)
            if mine is not None:
                torch.testing.assert_close(mine, plain_one, atol=2e-3, rtol=1e-3)


def test_rows_that_end_early_hand_back_the_state_of_plain_generate() -> None:
    """An EOS inside an accepted draft leaves the state too far ahead; it is computed again."""
    model, given = build("lfm2"), hybrid_models.inputs(RAGGED)
    stop = plain("lfm2", RAGGED)[:, RAGGED[0] + 5].tolist()
    caches = []
    for options in ({}, {"spec_strategy": "draft", "assistant": noisy_copy("lfm2")}):
        cache = DynamicCache(config=model.config)
        output = model.generate(
            **given,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=stop[:2],
            **{CACHE_NAME: cache},
            **options,
        )
        caches.append((output, cache))
    (expected, theirs), (found, ours) = caches
    assert found.tolist() == expected.tolist()
    for our, their in zip(ours.layers, theirs.layers, strict=True):
        if hasattr(our, "conv_states"):
            # Sums over several tokens round differently from those over one token.
            torch.testing.assert_close(
                our.conv_states[0], their.conv_states[0], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("name", sorted(MAMBA_1 - PURE))
def test_the_cache_of_a_mamba_is_not_resumed(name: str) -> None:
    model = build(name)
    cache = DynamicCache(config=model.config)
    given = hybrid_models.inputs(ONE)
    text = model.generate(**given, **{CACHE_NAME: cache}, max_new_tokens=4, do_sample=False)
    text = torch.cat([text, text[:, :3]], dim=1)
    refuse("ForCausalLM in .* resets its state", model=model, input_ids=text, **{CACHE_NAME: cache})


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(PURE))
def test_a_cache_without_a_length_is_not_resumed(name: str) -> None:
    model = build(name)
    cache = DynamicCache(config=model.config)
    refuse("does not record how many", model=model, **cache_argument(model.forward, cache))


# --- drafts from parts of the target ---


@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba", "nemotron_h"])
def test_the_first_layers_draft(name: str) -> None:
    output = build(name).generate(
        **hybrid_models.inputs(RAGGED),
        max_new_tokens=NEW_TOKENS[RAGGED],
        do_sample=False,
        spec_strategy=hf_spec.TreeConfig(max_draft_tokens=3),
        assistant=hf_spec.truncated_draft(build(name), 2),
    )
    assert_plain(name, RAGGED, output)


@pytest.mark.parametrize("mode", ["embeddings", "gated"])
def test_adaptive_tokens_draft(mode: str) -> None:
    adapter = random_adaptive_tokens(build("lfm2"), mode=mode)
    assert not any(".conv." in name for name in adapter.tensors)
    output = build("lfm2").generate(
        **hybrid_models.inputs(RAGGED),
        max_new_tokens=NEW_TOKENS[RAGGED],
        do_sample=False,
        spec_strategy=hf_spec.SdsatConfig(tree=wide_tree()),
        assistant=adapter,
    )
    assert_plain("lfm2", RAGGED, output)


def test_drafts_of_copied_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Lfm2ForCausalLM has recurrent layers"):
        FalconHead(build("lfm2"), FalconShape(), None)
    with pytest.raises(OptionError, match="ZambaForCausalLM share weights"):
        hf_spec.truncated_draft(build("zamba"), 1)
    names = [name for name, _ in build("lfm2").named_modules() if name.endswith("conv.in_proj")]
    lora = {name: (torch.zeros(1, 32), torch.zeros(96, 1)) for name in names}
    with pytest.raises(UnsupportedError, match="belongs to a recurrent layer"):
        GatedLora(lora).check(build("lfm2"))


# --- planted mistakes ---


def rejected_are_kept(
    mixers: RecurrentMixers, keep: Any, paths: dict[int, list[int]]
) -> dict[int, list[int]]:
    """Advance the state over the whole drafted chain."""
    ran: dict[int, list[int]] = {}
    for row, offset in mixers._round.inputs:
        ran.setdefault(row, []).append(offset)
    return {row: ran[row] for row in paths}


def roots_are_forgotten(
    mixers: RecurrentMixers, keep: Any, paths: dict[int, list[int]]
) -> dict[int, list[int]]:
    """Leave the state unchanged in rounds that accept nothing."""
    return {row: path if len(path) > 1 else [] for row, path in paths.items()}


@pytest.mark.parametrize("mistake", [rejected_are_kept, roots_are_forgotten])
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "mamba"])
def test_wrong_tokens_in_the_state_are_seen(
    name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = RecurrentMixers.keep
    monkeypatch.setattr(
        RecurrentMixers, "keep", lambda self, paths: keep(self, mistake(self, keep, paths))
    )
    output = guessed(name, ONE, branches=False)
    assert output.sequences.tolist() != plain(name, ONE).tolist()


@pytest.mark.parametrize("part", [0, 1], ids=["convolution", "recurrence"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_half_a_state_taken_back_is_seen(
    name: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two states advances over the whole draft; the other one is correct."""
    keep = RecurrentMixers.keep

    def half(self: RecurrentMixers, paths: dict[int, list[int]]) -> None:
        ends = {id(m): m.states.get(0) for m in self._mixers.values()}
        keep(self, paths)
        for mixer in self._mixers.values():
            end = ends[id(mixer)]
            if end is not None:
                mixer.states[COMMITTED][part].copy_(end[part])

    monkeypatch.setattr(RecurrentMixers, "keep", half)
    output = guessed(name, ONE, branches=False)
    assert output.sequences.tolist() != plain(name, ONE).tolist()


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_an_old_state_in_a_slot_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentMixers, "restart", lambda self, row: None)
    found, alone = in_slots(name)
    assert found != alone


# --- overhead ---


class Counted:
    """Number of calls of one mixer, and of tokens in these calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        self.calls = self.tokens = 0
        run, first = Mixer.run, mixers_of(build(name))[0]

        def counting(mixer: Any, inputs: Tensor, state: Any) -> Any:
            if mixer.module is first:
                self.calls += 1
                self.tokens += inputs.shape[0] * inputs.shape[1]
            return run(mixer, inputs, state)

        monkeypatch.setattr(Mixer, "run", counting)


@pytest.mark.by_default(branches=(True,))
@pytest.mark.parametrize(
    ("branches", "calls", "tokens"), [(False, 109 / 54, 598 / 398), (True, 97 / 48, 1582 / 622)]
)
def test_a_round_takes_two_calls_of_a_mixer(
    branches: bool, calls: float, tokens: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits, per target forward pass and token, were measured with the first prototype."""
    counted = Counted(monkeypatch, "qwen3_5_text")
    given = hybrid_models.inputs(ONE)
    expected = build("qwen3_5_text").generate(**given, max_new_tokens=200, do_sample=False)
    stats: SpecStats = speculate(build("qwen3_5_text"), given, expected, branches).spec_stats
    assert counted.calls <= calls * stats.target_forwards
    assert counted.tokens <= tokens * stats.target_tokens


def test_a_chain_that_is_accepted_whole_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, "lfm2")
    stats = (
        build("lfm2")
        .generate(
            **hybrid_models.inputs(ONE),
            max_new_tokens=40,
            do_sample=False,
            spec_strategy=hf_spec.DraftConfig(max_draft_tokens=4, length_policy="static"),
            assistant=build("lfm2", initializer_range=0.3),
            return_dict_in_generate=True,
        )
        .spec_stats
    )
    # The prompt is a separate call, and the last draft is truncated.
    assert counted.calls <= stats.target_forwards + 2


# --- sampling ---


@cache
def small(seed: int) -> Lfm2ForCausalLM:
    torch.manual_seed(seed)
    config = Lfm2Config(
        vocab_size=test_distribution.VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        layer_types=["conv", "full_attention"],
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Lfm2ForCausalLM(config).eval()
    with torch.no_grad():
        for mixer in mixers_of(model):
            for weight in mixer.parameters():
                weight.normal_(0, 0.7)
    return model


def sampled_p_value(monkeypatch: pytest.MonkeyPatch, draws: int) -> float:
    call = {"spec_strategy": hf_spec.DraftConfig(max_draft_tokens=2), "assistant": small(1)}
    monkeypatch.setattr(test_distribution, "tiny", small)
    monkeypatch.setattr(test_distribution, "arguments", lambda _: call)
    return test_distribution.worst_p_value([test_distribution.REPETITIVE], {}, "draft", draws)


def test_sampling_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_p_value(monkeypatch, 2000) > test_distribution.ALPHA


def test_sampling_from_a_wrong_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RecurrentMixers.keep
    monkeypatch.setattr(
        RecurrentMixers,
        "keep",
        lambda self, paths: keep(self, rejected_are_kept(self, keep, paths)),
    )
    assert sampled_p_value(monkeypatch, 1500) < test_distribution.REJECTED

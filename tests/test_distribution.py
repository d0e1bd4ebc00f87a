"""Sampling keeps the target's own distribution: chi-square on a vocabulary of eight tokens.

The first three generated tokens of `model.generate(do_sample=True, spec_strategy=...)` are compared
jointly with probabilities from plain forward passes over every possible prefix and transformers'
own processors. Deliberately broken verifiers must fail the same test, or it would prove nothing.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as hf

from hf_spec import (
    AutoConfig,
    BlockConfig,
    DiscoConfig,
    DraftConfig,
    EagleConfig,
    FalconConfig,
    GemmaAssistantConfig,
    GsdConfig,
    HeadsConfig,
    LookupConfig,
    MtpConfig,
    PardConfig,
    SdsatConfig,
    TreeConfig,
)
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.adapters.published import PublishedHead
from hf_spec.drafting import level_drafter
from hf_spec.engine.decode import drafter
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.evaluation.lossless.distribution import IMPOSSIBLE, chi_square
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.feature_pairs.draft_head import DraftHead
from hf_spec.methods.gemma_assistant.head import GemmaAssistant
from hf_spec.methods.gemma_assistant.head import build as build_assistant
from hf_spec.methods.mtp.head import MtpHead
from tests.biased_rules import NoResidual, RedrawnBonus, SiblingsWithoutUpdate
from tests.feature_reference import deepspec, dflash2, medusa, muse
from tests.gemma_reference import published
from tests.mtp_reference import head_for
from tests.published_heads import random_tensors, save
from tests.tiny_models import TIMINGS, random_adaptive_tokens, save_disco_adapter

VOCAB = 8
STEPS = 3
ROWS_PER_CALL = 250
# Draws per test; broken variants must be detected with the same number.
DRAWS = 3_000

# Seeds are fixed, so a test always passes or always fails until a change of the code shifts the
# random stream. One false alarm in a million per test is rare enough, while the p-value of every
# broken variant below is under 1e-9 with the same number of draws.
ALPHA = 1e-6
REJECTED = 1e-9

REPETITIVE = [1, 2, 3, 1, 2, 4, 1, 2]
# Padded on the left with token 0; lookup finds matches in each.
RAGGED = [REPETITIVE, [5, 6, 5], [3, 3, 4, 3, 3]]

# Within the range of the random classifier's predictions for the draft model.
DISCO_THRESHOLD = 0.464

# With these costs both a draft model and a head are used.
AUTO_TIMINGS = {**TIMINGS, "draft": {"tree": [[1, 0.1]], "falcon": [[1, 0.1]]}}

# Equal tokens are merged at any position: with two draft levels, most of the second one.
MERGING: dict[str, Any] = {"min_probability": 0.0, "min_sibling_ratio": 0.0, "merge_length": 0}

PLAIN: dict[str, Any] = {}
TOP_K = {"temperature": 0.7, "top_k": 4}
TOP_P = {"top_p": 0.8}
REPETITION = {"repetition_penalty": 1.3}
NO_REPEATS = {"no_repeat_ngram_size": 1}


@cache
def tiny(seed: int, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@cache
def pard_draft() -> LlamaForCausalLM:
    """Return a separate draft model, as the others must not have a mask token."""
    draft = copy.deepcopy(tiny(1))
    draft.config.pard_token = VOCAB - 1
    return draft


@cache
def draft_of_few_tokens() -> LlamaForCausalLM:
    """Return a draft model that predicts only half of the tokens."""
    draft = copy.deepcopy(tiny(1))
    few = torch.tensor([1, 3, 4, 6])
    draft.set_output_embeddings(DraftHead(draft.get_output_embeddings(), few))
    return draft


@cache
def disco_config() -> DiscoConfig:
    """Return the config of a random classifier that stops after some draft tokens but not others.

    Its folder is deleted at exit.
    """
    folder = tempfile.mkdtemp(prefix="disco_adapter_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_disco_adapter(folder, tiny(0), max_draft_tokens=2)
    return DiscoConfig(adapter=folder, acceptance_threshold=DISCO_THRESHOLD)


@cache
def falcon_head() -> FalconHead:
    torch.manual_seed(3)
    return FalconHead(tiny(0), FalconShape(1, 1), None).requires_grad_(False).eval()


@cache
def eagle_head() -> str:
    """Return the folder of an EAGLE-1 head, deleted at exit."""
    shapes = {
        "fc.weight": (16, 32),
        "layers.0.self_attn.q_proj.weight": (16, 16),
        "layers.0.self_attn.k_proj.weight": (8, 16),
        "layers.0.self_attn.v_proj.weight": (8, 16),
        "layers.0.self_attn.o_proj.weight": (16, 16),
        "layers.0.mlp.gate_proj.weight": (16, 16),
        "layers.0.mlp.up_proj.weight": (16, 16),
        "layers.0.mlp.down_proj.weight": (16, 16),
        "layers.0.post_attention_layernorm.weight": (16,),
    }
    config = {"model_type": "eagle", "num_attention_heads": 2, "rms_norm_eps": 1e-5}
    return save("tiny", config, random_tensors(shapes))


@cache
def gemma_assistant() -> GemmaAssistant:
    return build_assistant(published(tiny(0)), tiny(0))


@cache
def mtp_head() -> MtpHead:
    return head_for(tiny(0))


# Sampled drafts, verified by residual rejection.
CHAIN = {"max_draft_tokens": 2, "children": 1}
# The published loop verifies in its second forward pass, which leaves one draft of three tokens.
SDSAT_TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)]


@cache
def block_head() -> PublishedHead:
    head = deepspec(layers=(0, 1), size=16, vocab=VOCAB)
    return replace(head, config={**head.config, "block_size": 2})


@cache
def muse_head() -> PublishedHead:
    head = muse(layers=(0, 1), size=16, vocab=VOCAB)
    return replace(head, config={**head.config, "block_size": 3})


@cache
def dflash2_head() -> PublishedHead:
    """Return a head that can draft five of the eight tokens after each prefix."""
    head = dflash2(layers=(0, 1), size=16, vocab=VOCAB)
    inner = {**head.config["dflash_config"], "block_size": 3, "selector_top_k": 5}
    return replace(head, config={**head.config, "dflash_config": inner})


@cache
def adaptive() -> SpecAdapter:
    return random_adaptive_tokens(tiny(0))


def arguments(strategy: str) -> dict[str, Any]:
    draft = tiny(1)
    return {
        "lookup": {"spec_strategy": LookupConfig(max_matches=3)},
        "draft": {"spec_strategy": DraftConfig(max_draft_tokens=2), "assistant": draft},
        "measured": {
            "spec_strategy": DraftConfig(length_policy="measured", max_draft_tokens=2),
            "assistant": draft,
        },
        "measured siblings": {
            "spec_strategy": TreeConfig(length_policy="measured", max_nodes=12, sample_drafts=True),
            "assistant": draft,
        },
        "wider": {
            "spec_strategy": DraftConfig(max_draft_tokens=2),
            "assistant": tiny(1, VOCAB + 3),
        },
        "narrower": {
            "spec_strategy": TreeConfig(children=3, max_nodes=12, sample_drafts=True),
            "assistant": tiny(1, VOCAB - 3),
        },
        "few tokens": {
            "spec_strategy": DraftConfig(max_draft_tokens=2),
            "assistant": draft_of_few_tokens(),
        },
        "few tokens tree": {
            "spec_strategy": TreeConfig(children=3, max_nodes=8, sample_drafts=True),
            "assistant": draft_of_few_tokens(),
        },
        "confident": {
            "spec_strategy": DraftConfig(length_policy="confidence", confidence_threshold=0.2),
            "assistant": draft,
        },
        "gsd": {"spec_strategy": GsdConfig(min_probability=0.0), "assistant": draft},
        "merging": {"spec_strategy": GsdConfig(**MERGING), "assistant": draft},
        "lossy": {"spec_strategy": GsdConfig(**MERGING, lossy=True), "assistant": draft},
        "lossy tree": {
            "spec_strategy": GsdConfig(**{**MERGING, "merge_length": None}, lossy=True),
            "assistant": draft,
        },
        "disco": {"spec_strategy": disco_config(), "assistant": draft},
        "itself": {"spec_strategy": DraftConfig(max_draft_tokens=2), "assistant": tiny(0)},
        "falcon": {
            "spec_strategy": FalconConfig(tree=[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)]),
            "assistant": falcon_head(),
        },
        "eagle": {
            "spec_strategy": EagleConfig(width=3, max_draft_tokens=2, max_nodes=8),
            "assistant": eagle_head(),
        },
        "eagle chain": {
            "spec_strategy": EagleConfig(tree="chain", max_draft_tokens=2),
            "assistant": eagle_head(),
        },
        "sdsat": {"spec_strategy": SdsatConfig(tree=SDSAT_TREE), "assistant": adaptive()},
        "sdsat fused": {
            "spec_strategy": SdsatConfig(tree=SDSAT_TREE, fused=True),
            "assistant": adaptive(),
        },
        "sdsat lossy": {
            "spec_strategy": SdsatConfig(tree=SDSAT_TREE, fused=True, lossy=True),
            "assistant": adaptive(),
        },
        "auto": {
            "spec_strategy": AutoConfig(timings=AUTO_TIMINGS),
            "assistant": [draft, falcon_head()],
        },
        "auto sdsat": {"spec_strategy": AutoConfig(timings=TIMINGS), "assistant": adaptive()},
        "block": {"spec_strategy": BlockConfig(**CHAIN), "assistant": block_head()},
        "block by cost": {"spec_strategy": BlockConfig(), "assistant": block_head()},
        "dflash2": {"spec_strategy": BlockConfig(**CHAIN), "assistant": dflash2_head()},
        "dflash2 by cost": {"spec_strategy": BlockConfig(), "assistant": dflash2_head()},
        "muse": {"spec_strategy": BlockConfig(**CHAIN), "assistant": muse_head()},
        "block surely": {
            "spec_strategy": BlockConfig(length_policy="head", confidence_threshold=0.5),
            "assistant": block_head(),
        },
        "block tree": {
            "spec_strategy": BlockConfig(tree=[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)]),
            "assistant": block_head(),
        },
        "heads": {
            "spec_strategy": HeadsConfig(children=2, max_draft_tokens=2),
            "assistant": medusa(size=16, vocab=VOCAB),
        },
        "pard": {"spec_strategy": PardConfig(max_draft_tokens=2), "assistant": pard_draft()},
        "pard tree": {
            "spec_strategy": PardConfig(max_draft_tokens=2, children=3, max_nodes=8),
            "assistant": pard_draft(),
        },
        "gemma assistant": {
            "spec_strategy": GemmaAssistantConfig(
                tree="dynamic", width=3, max_draft_tokens=2, max_nodes=8
            ),
            "assistant": gemma_assistant(),
        },
        "gemma chain": {
            "spec_strategy": GemmaAssistantConfig(max_draft_tokens=2),
            "assistant": gemma_assistant(),
        },
        "mtp": {"spec_strategy": MtpConfig(max_draft_tokens=2), "assistant": mtp_head()},
        "mtp tree": {
            "spec_strategy": MtpConfig(tree="dynamic", width=3, max_draft_tokens=2, max_nodes=8),
            "assistant": mtp_head(),
        },
        "tree": {"spec_strategy": TreeConfig(children=2, max_nodes=6), "assistant": draft},
        "siblings": {
            "spec_strategy": TreeConfig(children=3, max_nodes=12, sample_drafts=True),
            "assistant": draft,
        },
    }[strategy]


def processors(settings: dict[str, Any], prompt: list[int]) -> list[Any]:
    """Return the processors that generate() creates for the settings, in its order."""
    made = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
    }
    return [make(settings[name]) for name, make in made.items() if name in settings]


@torch.no_grad()
def exact(prompt: list[int], settings: dict[str, Any], eos: int | None) -> Tensor:
    """Return (VOCAB ** STEPS,) probabilities of all continuations: one forward pass per prefix."""
    prefixes = torch.tensor([prompt])
    joint = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(STEPS):
        scores = tiny(0)(prefixes, use_cache=False).logits[:, -1].float()
        for processor in processors(settings, prompt):
            scores = processor(prefixes, scores)
        probs = scores.double().softmax(dim=-1)
        if eos is not None:
            ended = (prefixes[:, len(prompt) :] == eos).any(dim=1)
            probs[ended] = torch.eye(VOCAB, dtype=torch.float64)[0]
        joint = joint.reshape(-1, 1) * probs
        nodes = torch.arange(VOCAB).repeat(prefixes.shape[0])[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), nodes], dim=1)
    return joint.flatten()


def sample(
    prompts: list[list[int]], settings: dict[str, Any], strategy: str, draws: int, eos: int | None
) -> Tensor:
    """Return (prompts, draws, STEPS) tokens that generate() samples."""
    width = max(len(p) for p in prompts)
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    copies = ROWS_PER_CALL // len(prompts)
    torch.manual_seed(7)
    drawn = []
    for _ in range(-(-draws // copies)):
        out = tiny(0).generate(
            padded,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=STEPS,
            num_return_sequences=copies,
            eos_token_id=eos,
            **{"top_k": 0, **settings},
            **arguments(strategy),
        )
        new = out[:, width:]
        missing = STEPS - new.shape[1]
        new = torch.nn.functional.pad(new, (0, missing))
        drawn.append(new.reshape(len(prompts), copies, STEPS))
    return torch.cat(drawn, dim=1)


def p_value(tokens: Tensor, joint: Tensor) -> float:
    """Return the chi-square p-value of (draws, STEPS) tokens against the joint distribution.

    Rare continuations share a cell.
    """
    place = VOCAB ** torch.arange(STEPS - 1, -1, -1)
    counts = torch.bincount((tokens * place).sum(dim=1), minlength=VOCAB**STEPS)
    expected = joint * len(tokens)
    impossible = int(counts[joint < IMPOSSIBLE].sum())
    found = zip(expected.tolist(), counts.tolist(), strict=True)
    return chi_square(found, impossible).p_value


def worst_p_value(
    prompts: list[list[int]],
    settings: dict[str, Any],
    strategy: str,
    draws: int = DRAWS,
    eos: int | None = None,
) -> float:
    drawn = sample(prompts, settings, strategy, draws, eos)
    return min(
        p_value(tokens, exact(prompt, settings, eos))
        for prompt, tokens in zip(prompts, drawn, strict=True)
    )


CASES = [
    ("lookup", PLAIN),
    ("lookup", REPETITION),
    ("draft", PLAIN),
    ("draft", TOP_K),
    ("draft", REPETITION),
    ("measured", PLAIN),
    ("measured", REPETITION),
    ("measured siblings", PLAIN),
    ("wider", PLAIN),
    ("wider", REPETITION),
    ("narrower", PLAIN),
    ("narrower", REPETITION),
    ("few tokens", PLAIN),
    ("few tokens", {**TOP_K, **TOP_P}),
    ("few tokens tree", {**REPETITION, **TOP_P}),
    ("confident", PLAIN),
    ("disco", PLAIN),
    ("disco", TOP_K),
    ("disco", REPETITION),
    ("itself", TOP_P),
    ("gsd", PLAIN),
    ("merging", PLAIN),
    ("merging", TOP_P),
    ("merging", REPETITION),
    ("auto", PLAIN),
    ("auto", REPETITION),
    ("auto sdsat", PLAIN),
    ("tree", PLAIN),
    ("tree", REPETITION),
    ("falcon", PLAIN),
    ("falcon", TOP_K),
    ("falcon", REPETITION),
    ("eagle chain", PLAIN),
    ("block", TOP_K),
    ("block by cost", PLAIN),
    ("block by cost", REPETITION),
    ("dflash2 by cost", TOP_K),
    ("dflash2", PLAIN),
    ("dflash2", TOP_K),
    ("muse", PLAIN),
    ("heads", PLAIN),
    ("sdsat", PLAIN),
    ("sdsat", REPETITION),
    ("sdsat fused", PLAIN),
    ("sdsat fused", TOP_P),
    ("sdsat fused", REPETITION),
    ("siblings", PLAIN),
    ("siblings", TOP_K),
    ("siblings", REPETITION),
]
# Slow here; each method has its own tests of its differences from the others.
SLOW_CASES = [
    ("pard", TOP_K),
    ("pard", REPETITION),
    ("pard tree", TOP_P),
    ("gemma assistant", TOP_K),
    ("gemma assistant", REPETITION),
    ("gemma chain", PLAIN),
    ("mtp", TOP_K),
    ("mtp tree", REPETITION),
]
SLOW = pytest.mark.slow
SLOW_CHAINS = [pytest.param(name, marks=SLOW) for name in ("pard", "gemma chain", "mtp")]
SLOW_TREES = [
    pytest.param(name, marks=SLOW) for name in ("pard tree", "gemma assistant", "mtp tree")
]
NAMES = [f"{strategy}-{'-'.join(settings) or 'plain'}" for strategy, settings in CASES]


@pytest.mark.by_default(
    strategy=("draft", "merging", "falcon", "siblings", "block by cost"),
    settings=lambda settings: settings == REPETITION,
)
@pytest.mark.parametrize(("strategy", "settings"), CASES, ids=NAMES)
def test_joint_distribution_of_the_first_tokens(strategy: str, settings: dict[str, Any]) -> None:
    assert worst_p_value([REPETITIVE], settings, strategy) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "settings"), SLOW_CASES)
def test_drafters_that_others_publish(strategy: str, settings: dict[str, Any]) -> None:
    assert worst_p_value([REPETITIVE], settings, strategy) > ALPHA


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", ["tree", "siblings"])
def test_what_the_prefix_forbids_never_comes(strategy: str) -> None:
    assert worst_p_value([[5, 6, 5]], NO_REPEATS, strategy) > ALPHA


@pytest.mark.by_default(strategy=("measured",))
@pytest.mark.parametrize(
    "strategy",
    [
        "lookup",
        "draft",
        "measured",
        "disco",
        "merging",
        pytest.param("pard", marks=SLOW),
        pytest.param("gemma chain", marks=SLOW),
        pytest.param("mtp", marks=SLOW),
        "falcon",
        "sdsat",
        "sdsat fused",
        "siblings",
        "auto",
    ],
)
def test_every_row_of_a_ragged_batch_has_its_own_distribution(strategy: str) -> None:
    # Token 2 ends a row, so that rows of one batch finish at different times.
    assert worst_p_value(RAGGED, REPETITION, strategy, draws=DRAWS // 2, eos=2) > ALPHA


@pytest.mark.by_default(settings=lambda settings: settings == PLAIN, strategy=("lossy tree",))
@pytest.mark.parametrize("settings", [PLAIN, TOP_P], ids=["plain", "top_p"])
@pytest.mark.parametrize("strategy", ["lossy", "lossy tree"])
def test_the_lossy_rule_of_gsd_is_lossy(strategy: str, settings: dict[str, Any]) -> None:
    assert worst_p_value([REPETITIVE], settings, strategy) < REJECTED


@pytest.mark.parametrize("settings", [PLAIN, TOP_P], ids=["plain", "top_p"])
def test_the_lossy_rule_of_sdsat_is_lossy(settings: dict[str, Any]) -> None:
    assert worst_p_value([REPETITIVE], settings, "sdsat lossy") < REJECTED


def test_merged_drafts_are_accepted_in_these_tests() -> None:
    for strategy in ("merging", "lossy"):
        torch.manual_seed(7)
        output = tiny(0).generate(
            torch.tensor([REPETITIVE]),
            do_sample=True,
            max_new_tokens=STEPS,
            num_return_sequences=400,
            return_dict_in_generate=True,
            **arguments(strategy),
        )
        assert output.spec_stats.counters["rounds_with_merged_accepted"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["block surely", "block tree"])
def test_other_drafts_of_a_block(strategy: str) -> None:
    assert worst_p_value(RAGGED, REPETITION, strategy, draws=DRAWS // 2, eos=2) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [[REPETITIVE], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("settings", [PLAIN, TOP_K, REPETITION], ids=["plain", "top_k", "penalty"])
@pytest.mark.parametrize(
    "strategy", ["lookup", "draft", "tree", "merging", "siblings", "eagle", "eagle chain"]
)
def test_joint_distribution_with_100_000_draws(
    strategy: str, settings: dict[str, Any], prompts: list[list[int]]
) -> None:
    assert worst_p_value(prompts, settings, strategy, draws=100_000 // len(prompts)) > ALPHA


def flatter(distributions: Any) -> Tensor | None:
    """Return the draft probabilities before a temperature of 0.5, not those of the sampling."""
    probs = draft_model_stack(distributions)
    if probs is None:
        return None
    return torch.nn.functional.normalize(probs.sqrt(), p=1, dim=-1)


draft_model_stack = level_drafter.stacked
whole_draft = DraftModelDrafter.draft


@cache
def target_probs(text: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return tiny(0)(torch.tensor([text])).logits[0, -1].softmax(dim=-1)


def draft_that_peeks(self: DraftModelDrafter, state: Any, limits: Any) -> DraftTree:
    """Discard the whole draft if its first token is less likely for the target."""
    tree = whole_draft(self, state, limits)
    if tree.draft_probs is None:  # There was room for one token only.
        return tree
    rows, kept = [], []
    for row, text in enumerate(state.tokens):
        nodes = list(tree.nodes(row))
        if len(nodes) > 1:
            token = tree.tokens[nodes[1]]
            if target_probs(tuple(text))[token] < tree.draft_probs[nodes[0], token]:
                nodes = nodes[:1]
        rows.append(([tree.tokens[n] for n in nodes], list(range(-1, len(nodes) - 1))))
        kept += nodes
    return DraftTree.from_rows(rows, draft_probs=tree.draft_probs[kept])


class TestBrokenTwins:
    """Broken variants that the test above must detect."""

    @pytest.mark.by_default(strategy=("draft", "siblings"))
    @pytest.mark.parametrize(
        "strategy",
        [
            "draft",
            "few tokens",
            "siblings",
            "eagle chain",
            "block",
            "dflash2",
            "muse",
            *SLOW_CHAINS,
        ],
    )
    def test_rejection_without_residual(
        self, strategy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafter, "ResidualRejection", NoResidual)
        assert worst_p_value([REPETITIVE], PLAIN, strategy) < REJECTED

    def test_siblings_judged_like_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafter, "ResidualRejection", SiblingsWithoutUpdate)
        assert worst_p_value([REPETITIVE], PLAIN, "siblings") < REJECTED

    @pytest.mark.by_default(strategy=("tree", "falcon"))
    @pytest.mark.parametrize(
        "strategy",
        ["lookup", "tree", *SLOW_TREES, "falcon", "block by cost", "heads", "sdsat fused", "auto"],
    )
    def test_bonus_redrawn_after_a_miss(
        self, strategy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafter, "NodeDraw", RedrawnBonus)
        assert worst_p_value([REPETITIVE], PLAIN, strategy) < REJECTED

    def test_a_length_that_depends_on_the_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DraftModelDrafter, "draft", draft_that_peeks)
        assert worst_p_value([REPETITIVE], PLAIN, "disco") < REJECTED

    def test_draft_probs_that_were_not_drawn_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(level_drafter, "stacked", flatter)
        assert worst_p_value([REPETITIVE], {"temperature": 0.5}, "draft") < REJECTED

    def test_one_row_with_the_prefix_of_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class WrongPrefix(NodeDraw):
            def _step(self, tree: Any, walk: Any, here: Any, paths: Any) -> dict[int, Any]:
                return super()._step(tree, walk, here, {row: [] for row in paths})

        monkeypatch.setattr(drafter, "NodeDraw", WrongPrefix)
        assert worst_p_value([[5, 6, 5]], NO_REPEATS, "tree") < REJECTED

"""Draft models with another tokenizer: output is exact, and good drafts are accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T

import hf_spec
from hf_spec import DraftConfig, GsdConfig, OptionError, TreeConfig
from hf_spec.drafting.length_policy import make_policy
from hf_spec.engine.decode import drafter as drafter_module
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.other_tokenizer.draft_text import DraftText
from hf_spec.methods.draft_model.other_tokenizer.drafter import make_cross_tokenizer_drafter
from tests import test_distribution as chi
from tests.biased_rules import NoResidual, RedrawnBonus
from tests.model_watch import snapshot
from tests.other_tokenizers import (
    KINDS,
    PROMPTS,
    batch,
    bpe,
    learned,
    letters,
    pair,
    random_model,
    subset,
    unigram,
)
from tests.tiny_models import TIMINGS

TRANSLATIONS = ["shared", "text"]
DRAFTS = ["unigram", "wordpiece", "subset"]
SHAPES: dict[str, Any] = {
    "chain": lambda how: DraftConfig(max_draft_tokens=5, translation=how),
    "tree": lambda how: TreeConfig(max_draft_tokens=4, max_nodes=12, translation=how),
    "graph": lambda how: GsdConfig(min_probability=0.0, merge_length=0, translation=how),
    "measured": lambda how: DraftConfig(length_policy="measured", translation=how),
}
# Every tokenizer with trees, every shape with one tokenizer.
CASES = [(kind, "tree") for kind in DRAFTS]
CASES += [("unigram", shape) for shape in SHAPES if shape != "tree"]


def speculation(kind: str, config: Any, model: Any = None) -> dict[str, Any]:
    return {
        "spec_strategy": config,
        "assistant": model or learned(kind),
        "tokenizer": bpe(),
        "assistant_tokenizer": KINDS[kind](),
    }


def generate(inputs: Any, new_tokens: int = 30, **options: Any) -> Any:
    return learned("bpe").generate(
        **inputs, max_new_tokens=new_tokens, return_dict_in_generate=True, **options
    )


def least_tau(kind: str, translation: str) -> float:
    """Return the minimum tau of good drafts; a draft model that learned nothing is below 0.02.

    Such small vocabularies have few tokens in common, and the trained models differ between
    machines.
    """
    few = translation == "shared" and kind != "subset"
    return 0.1 if few else 0.25


@pytest.mark.parametrize("translation", TRANSLATIONS)
class TestIdentity:
    @pytest.mark.by_default(kind=("unigram",))
    @pytest.mark.parametrize(("kind", "shape"), CASES)
    def test_drafts_are_accepted_and_the_output_is_the_targets(
        self, kind: str, shape: str, translation: str
    ) -> None:
        inputs = batch()
        found = generate(inputs, **speculation(kind, SHAPES[shape](translation)))
        assert torch.equal(found.sequences, generate(inputs).sequences)
        assert found.spec_stats.tau > least_tau(kind, translation)

    @pytest.mark.parametrize("kind", ["unigram", "subset"])
    def test_random_drafts_cost_time_alone(self, kind: str, translation: str) -> None:
        """The target's tokens split characters; the draft model's tokens are random."""
        target, draft = random_model(bpe()), random_model(KINDS[kind](), seed=3)
        inputs = batch(prompts=["日本", "naïve café — déjà", "the"])
        for config in (SHAPES["chain"](translation), SHAPES["tree"](translation)):
            options = {**inputs, "max_new_tokens": 12}
            found = target.generate(**options, **speculation(kind, config, draft))
            assert torch.equal(found, target.generate(**options))

    def test_continuous_batching(self, translation: str) -> None:
        inputs = batch()
        plain = generate(inputs).sequences
        prompts = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        outputs = learned("bpe").generate_batch(
            prompts,
            max_batch=2,
            max_new_tokens=30,
            **speculation("unigram", SHAPES["tree"](translation)),
        )
        width = inputs["input_ids"].shape[1]
        assert [one.generated_tokens for one in outputs.values()] == plain[:, width:].tolist()
        assert outputs.spec_stats.tau > least_tau("unigram", translation)

    def test_a_model_that_ends(self, translation: str) -> None:
        """Drafted end tokens are the target's."""
        inputs = batch()
        config = SHAPES["chain"](translation)
        ended = {"eos_token_id": bpe()(" dog").input_ids[-1], "pad_token_id": 0}
        found = generate(inputs, **ended, **speculation("unigram", config))
        assert torch.equal(found.sequences, generate(inputs, **ended).sequences)

    def test_drafts_end_at_the_last_position_of_the_draft_model(
        self, translation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The number of its own tokens counts, and rotary positions do not end."""
        lengths: list[int] = []
        ran = DraftModelDrafter.probabilities

        def run(self: Any, state: Any, growth: Any) -> Any:
            lengths.extend(len(self.ids[row]) + growth.depth for row in growth.rows)
            return ran(self, state, growth)

        monkeypatch.setattr(DraftModelDrafter, "probabilities", run)
        torch.manual_seed(0)
        size: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 20}
        ends = {"bos_token_id": None, "eos_token_id": None}
        made = T.GPT2Config(vocab_size=len(unigram()), **size, **ends)
        table, rotary = T.GPT2LMHeadModel(made).eval(), random_model(unigram())
        rotary.config.max_position_embeddings = 20
        inputs, config = batch(), SHAPES["chain"](translation)
        for model in (table, rotary):
            lengths.clear()
            found = generate(inputs, **speculation("unigram", config, model))
            assert torch.equal(found.sequences, generate(inputs).sequences)
            assert max(lengths) == 20 if model is table else max(lengths) > 25

    def test_models_are_left_as_they_were(self, translation: str) -> None:
        draft = learned("unigram")
        weights = [weight.clone() for weight in draft.parameters()]
        before = snapshot(draft), snapshot(learned("bpe"))
        generate(batch(), **speculation("unigram", SHAPES["tree"](translation)))
        assert before == (snapshot(draft), snapshot(learned("bpe")))
        assert all(map(torch.equal, weights, draft.parameters()))

    def test_transformers_loop_takes_its_candidates(self, translation: str) -> None:
        config = DraftConfig(max_draft_tokens=5, translation=translation).resolve(measures=False)
        policy = make_policy(config, learned("bpe"))
        drafter = make_cross_tokenizer_drafter(
            config, learned("subset"), policy, pair(bpe(), subset())
        )
        text = bpe()(PROMPTS[1], return_tensors="pt").input_ids
        for _ in range(3):
            candidates, _ = drafter.get_candidates(text)
            drafted = candidates.shape[1] - text.shape[1]
            plain = learned("bpe").generate(text, max_new_tokens=drafted + 1)
            right = int((candidates == plain[:, :-1])[0].long().cumprod(0).sum()) - text.shape[1]
            drafter.update_candidate_strategy(candidates, torch.empty(0), right)
            text = plain[:, : text.shape[1] + right + 1]
        assert text.shape[1] > len(bpe()(PROMPTS[1]).input_ids) + 3


def test_auto_has_one_among_its_drafters() -> None:
    inputs = batch()
    found = generate(inputs, **speculation("unigram", hf_spec.AutoConfig(timings=TIMINGS)))
    assert torch.equal(found.sequences, generate(inputs).sequences)
    assert found.spec_stats.counters["asked_tree"] > 0


def test_the_draft_model_sees_a_text_once() -> None:
    """Its KV cache is kept, so the whole text does not run again in every round."""
    runners: list[ModelRunner] = []
    init = ModelRunner.__init__

    def watched(self: ModelRunner, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        runners.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "__init__", watched)
        for how in TRANSLATIONS:
            generate(batch(), new_tokens=40, **speculation("unigram", SHAPES["chain"](how)))
    drafts = [runner for runner in runners if runner.model is learned("unigram")]
    assert len(drafts) == 2
    for runner in drafts:
        # About four tokens per round; the text alone has more than forty at the end.
        assert runner.tokens_run < 12 * runner.forwards


def test_keys_of_tokens_that_encoding_has_changed_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, model = random_model(bpe()), random_model(subset())
    config = DraftConfig(translation="text", length_policy="static")
    drafter: Any = make_cross_tokenizer_drafter(
        config, model, make_policy(config, target), pair(bpe(), subset())
    )
    drafter.start(GenerationState.create(**batch(prompts=PROMPTS[:1]), stop=StopRules([], 1)))
    drafter._stored_ids[0], drafter._runner.rows.stored[0] = [1, 2, 3], 3
    monkeypatch.setattr(DraftText, "read", lambda self, tokens: [1, 9, 4, 5])
    drafter._read([[7]], {0: 5})
    assert drafter._runner.rows.stored == [1]


class TestSampling:
    """Distributions on the vocabulary of `test_distribution`, with fewer draws."""

    OWN = ("a", "b", "c", "d", "ab", "e", "f")
    OTHER = ("b", "a", "e", "bc", "c", "d")

    @pytest.fixture(autouse=True)
    def other_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = {
            "tokenizer": letters(*self.OWN, merges=(("a", "b"),)),
            "assistant_tokenizer": letters(*self.OTHER, merges=(("b", "c"),)),
            "assistant": chi.tiny(1, len(self.OTHER) + 1),
        }
        configs = {
            "shared": DraftConfig(max_draft_tokens=2),
            "siblings": TreeConfig(children=3, max_nodes=12, sample_drafts=True),
            "text": TreeConfig(children=3, max_nodes=8, translation="text"),
        }
        monkeypatch.setattr(chi, "arguments", lambda name: {"spec_strategy": configs[name], **made})

    @pytest.mark.parametrize("name", ["shared", "siblings", "text"])
    def test_the_distribution_is_the_targets(self, name: str) -> None:
        assert chi.worst_p_value([chi.REPETITIVE], chi.REPETITION, name, draws=500) > chi.ALPHA

    @pytest.mark.slow
    def test_rows_of_a_batch_have_their_own(self) -> None:
        assert chi.worst_p_value(chi.RAGGED, {}, "shared", draws=200, eos=2) > chi.ALPHA

    def test_rejection_without_residual_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafter_module, "ResidualRejection", NoResidual)
        assert chi.worst_p_value([chi.REPETITIVE], {}, "shared", draws=800) < chi.REJECTED

    def test_a_bonus_drawn_again_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafter_module, "NodeDraw", RedrawnBonus)
        assert chi.worst_p_value([chi.REPETITIVE], {}, "text", draws=800) < chi.REJECTED


def test_the_lossy_rule_needs_probabilities() -> None:
    config = GsdConfig(lossy=True, translation="text")
    with pytest.raises(OptionError, match="use translation='shared'"):
        generate(batch(), **speculation("unigram", config))


def test_the_lossy_rule_of_shared_tokens() -> None:
    config = GsdConfig(lossy=True, min_probability=0.0, translation="shared")
    found = generate(batch(), do_sample=True, **speculation("unigram", config))
    assert found.spec_stats.drafted_tokens > 0

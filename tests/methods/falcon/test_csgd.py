"""Glancing distillation: shifts, replaced positions and losses, equal to manual computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.methods.falcon import csgd
from hf_spec.methods.falcon.csgd import (
    CsgdSettings,
    GlancingLoss,
    replaced_positions,
)
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.training.features import Text, text_features
from hf_spec.training.pairs import Pairs
from hf_spec.training.responses import Response
from hf_spec.training.trainer import MicroBatch

PLAIN = CsgdSettings(schedule="off", noise="off")


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response]) -> list[Text]:
    found = text_features(model, responses)
    return [Text(r, f.bfloat16()) for r, f in zip(responses, found, strict=True)]


def make_loss(
    model: PreTrainedModel,
    settings: CsgdSettings = PLAIN,
    block_size: int = 2,
    vocabulary: Tensor | None = None,
) -> GlancingLoss:
    torch.manual_seed(0)
    head = FalconHead(model, FalconShape(block_size, dropout=0.0), vocabulary)
    head.start_plain(1.0)
    return GlancingLoss(head.train(), model, settings, 4, 1.0)


class TestReplacedPositions:
    @pytest.mark.parametrize("grid", [0, 1])
    @pytest.mark.parametrize("first", [4, 5])
    def test_blocks_of_two(self, first: int, grid: int) -> None:
        for count in range(8):
            found = replaced_positions(first, 14, count, 2, grid)
            starts = [i for i in range(first, 14) if i % 2 == grid]
            assert len(set(found)) == len(found) == min(count, len(starts))
            assert set(found) <= set(starts)

    @pytest.mark.parametrize("k", [3, 4])
    def test_longer_blocks(self, k: int) -> None:
        seen = set()
        for seed in range(60):
            torch.manual_seed(seed)
            grid, count = seed % k, 3 * k + 1
            found = replaced_positions(7, 60, count, k, grid)
            blocks: dict[int, list[int]] = {}
            for position in found:
                assert 7 <= position < 60
                blocks.setdefault((position - grid) // k, []).append((position - grid) % k)
            assert len(blocks) == 3
            for inside in blocks.values():
                assert inside == list(range(len(inside)))
                seen.add(len(inside))
        assert seen == set(range(1, k))

    def test_nowhere_to_go(self) -> None:
        assert replaced_positions(5, 9, 4, 1, 0) == []
        assert replaced_positions(5, 5, 4, 2, 0) == []
        assert replaced_positions(5, 7, 12, 4, 0) == []
        assert replaced_positions(5, 20, 3, 4, 0) == []


class Spy(GlancingLoss):
    """Loss that records the inputs and outputs of the head, the pairs and the logits."""

    def __init__(self, base: GlancingLoss, settings: CsgdSettings, feature_size: float = 1.0):
        super().__init__(base.head, base.target, settings, 4, feature_size)
        self.fed: list[tuple[Tensor, Tensor, int]] = []
        self.outputs: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.pairs: list[Pairs] = []
        base.head.register_forward_hook(self._remember)

    def _remember(self, _: FalconHead, inputs: tuple, output: Tensor) -> None:
        self.fed.append(inputs)
        self.outputs.append(output.detach())

    def _read(self, outputs: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        found = super()._read(outputs, pairs)
        self.logits.append(found[1].detach())
        self.pairs.append(pairs)
        return found


class TestGlancing:
    def fed(
        self, model: PreTrainedModel, texts: Sequence[Text], settings: CsgdSettings, k: int
    ) -> Spy:
        base = make_loss(model, settings, k)
        spy = Spy(base, settings)
        spy(MicroBatch(texts, epoch=0, seed=5))
        return spy

    @pytest.mark.parametrize("k", [2, 3])
    @pytest.mark.parametrize("schedule", ["paper", "released"])
    def test_feature_and_token_move_together(
        self, model: PreTrainedModel, texts: list[Text], k: int, schedule: str
    ) -> None:
        settings = replace(PLAIN, schedule=schedule, replaced_token="data")
        spy = self.fed(model, texts, settings, k)
        (before, clean, grid), (tokens, features, same_grid) = spy.fed
        pairs = spy.pairs[0]
        assert grid == same_grid
        scores = model.get_output_embeddings()(
            pairs.features[pairs.rows, pairs.positions + k].float()
        )
        wrong = spy.logits[0].argmax(dim=-1) != scores.argmax(dim=-1)
        changed = (features != clean).any(dim=-1)
        num_changed = 0
        parts = wrong.split(pairs.counts)
        for row, ((first, stop), mine) in enumerate(zip(pairs.span, parts, strict=True)):
            positions = changed[row].nonzero()[:, 0].tolist()
            num_changed += len(positions)
            assert all(first <= position < stop for position in positions)
            # lambda * d, counted in this text only.
            count = int(settings.share(0, 4) * int(mine.sum()))
            candidates = [i for i in range(first, stop - k + 2) if i % k == grid]
            runs = min(len(candidates), count if k == 2 else count // k)
            assert len({(position - grid) // k for position in positions}) == runs
            for position in positions:
                assert torch.equal(features[row, position], clean[row, position + k])
                assert tokens[row, position] == before[row, position + k]
            kept = ~changed[row]
            assert torch.equal(tokens[row, kept], before[row, kept])
        assert num_changed > 3

    def test_the_teachers_token_is_that_of_greedy_answers(
        self, model: PreTrainedModel, texts: list[Text]
    ) -> None:
        paper = self.fed(model, texts, replace(PLAIN, schedule="paper"), 2)
        data = self.fed(model, texts, replace(PLAIN, schedule="paper", replaced_token="data"), 2)
        assert torch.equal(paper.fed[1][0], data.fed[1][0])
        other = [replace(texts[0], response=replace(texts[0].response, response=[5] * 12))]
        paper = self.fed(model, other, replace(PLAIN, schedule="paper"), 2)
        data = self.fed(model, other, replace(PLAIN, schedule="paper", replaced_token="data"), 2)
        assert not torch.equal(paper.fed[1][0], data.fed[1][0])

    @pytest.mark.parametrize("k", [2, 3])
    def test_replaced_positions_may_be_left_out_of_the_loss(
        self, model: PreTrainedModel, texts: list[Text], k: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = replace(PLAIN, schedule="paper")
        learning = make_loss(model, settings, k)
        leaving = GlancingLoss(
            learning.head, model, replace(settings, learn_replaced=False), 4, 1.0
        )
        batch, seen = MicroBatch(texts, seed=5), []
        distance = GlancingLoss._distance

        def watch(self: GlancingLoss, *parts: Tensor) -> Tensor:
            seen.append(parts)
            return distance(self, *parts)

        monkeypatch.setattr(GlancingLoss, "_distance", watch)
        chosen: list[Tensor] = []
        choose = GlancingLoss._choose
        monkeypatch.setattr(
            GlancingLoss,
            "_choose",
            lambda self, *given: chosen.append(choose(self, *given)) or chosen[-1],
        )
        (_, all_positions), (_, kept) = learning(batch), leaving(batch)
        assert torch.equal(*chosen)
        replaced = int(chosen[0].sum())
        assert replaced > 3
        assert kept == all_positions - replaced
        for part, whole in zip(seen[1], seen[0], strict=True):
            assert torch.equal(part, whole[~chosen[0]])

    def test_the_share_falls_with_the_steps(
        self, model: PreTrainedModel, texts: list[Text], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loss = make_loss(model, replace(PLAIN, schedule="steps"), 2)
        found = []
        replaced = GlancingLoss._replace

        def watch(self: GlancingLoss, *given: Any) -> Any:
            found.append(int(given[3].sum()))
            return replaced(self, *given)

        monkeypatch.setattr(GlancingLoss, "_replace", watch)
        for done in (0.0, 0.5, 0.99):
            loss(MicroBatch(texts, seed=5, done=done))
        assert found[0] > found[1] > found[2] == 0

    @pytest.mark.parametrize(("schedule", "k"), [("off", 2), ("paper", 1)])
    def test_one_pass_where_nothing_is_glanced_at(
        self, model: PreTrainedModel, texts: list[Text], schedule: str, k: int
    ) -> None:
        assert len(self.fed(model, texts, replace(PLAIN, schedule=schedule), k).fed) == 1

    @pytest.mark.parametrize("k", [1, 2, 3])
    @pytest.mark.parametrize("share", [0.5, 1.0])
    def test_own_features_come_in_whole_blocks(
        self, model: PreTrainedModel, texts: list[Text], k: int, share: float
    ) -> None:
        spy = self.fed(model, texts, replace(PLAIN, own_features=share), k)
        (before, clean, grid), (tokens, features, _) = spy.fed
        assert torch.equal(before, tokens)
        changed = (features != clean).any(dim=-1)
        assert not changed[:, :k].any()
        num_blocks = num_changed = 0
        for start in range(k + (grid - k) % k, features.shape[1] - k + 1, k):
            block, predicted = slice(start, start + k), slice(start - k, start)
            for row in range(len(texts)):
                mine = changed[row, block]
                assert mine.all() or not mine.any()
                num_blocks, num_changed = num_blocks + 1, num_changed + int(mine[0])
                if mine[0]:
                    own = spy.outputs[0][row, predicted].to(features.dtype)
                    assert torch.equal(features[row, block], own)
        assert num_changed == num_blocks if share == 1 else 0.3 < num_changed / num_blocks < 0.7

    @pytest.mark.parametrize("k", [1, 2])
    def test_own_features_of_own_features(
        self, model: PreTrainedModel, texts: list[Text], k: int
    ) -> None:
        """Each pass reads the features that the previous pass predicted, at the same positions."""
        spy = self.fed(model, texts, replace(PLAIN, own_features=0.7, own_passes=3), k)
        assert len(spy.fed) == 4
        clean = spy.fed[0][1]
        positions = None
        for (tokens, features, _), predicted in zip(spy.fed[1:], spy.outputs, strict=False):
            assert torch.equal(tokens, spy.fed[0][0])
            changed = (features != clean).any(dim=-1)
            assert positions is None or torch.equal(changed, positions)
            positions = changed
            earlier = torch.nn.functional.pad(predicted, (0, 0, k, 0))[:, : features.shape[1]]
            assert torch.equal(features[changed], earlier.to(features.dtype)[changed])
        assert positions is not None
        assert positions.any()
        # If the inputs of the last pass equaled those of the first, more passes would add nothing.
        assert not torch.equal(spy.fed[1][1], spy.fed[3][1])

    @pytest.mark.parametrize(("noise", "size"), [("paper", 0.1), ("released", 0.1 * 512 / 18)])
    def test_noise(self, model: PreTrainedModel, noise: str, size: float) -> None:
        """Noise scales with `feature_size` and is not added to the true features."""
        response = Response("a", "t", list(range(3, 9)), list(range(3, 15)))
        text = Text(response, torch.zeros(17, model.config.hidden_size))
        base = make_loss(model)
        spy = Spy(base, replace(PLAIN, noise=noise), 2.0)
        spy(MicroBatch([text]))
        ((_, features, _),) = spy.fed
        assert not spy.pairs[0].features.any()
        # "released" divides by the number of pairs (17), not of tokens (18).
        bound = 2 * size * (18 / 17 if noise == "released" else 1)
        assert 0.95 * bound < float(features.abs().max()) <= bound * 1.0001
        assert abs(float(features.mean())) < 0.1 * bound


class TestLosses:
    def expected(
        self, loss: GlancingLoss, text: Text, settings: CsgdSettings, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the feature, soft and hard losses, summed position by position in float32."""
        k = loss.head.shape.block_size
        torch.manual_seed(seed)
        grid = int(torch.randint(k, ()))
        line = [*text.response.prompt, *text.response.response]
        assert text.features is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = loss.head(torch.tensor([line[1:]]), text.features[None], grid)[0]
        near = soft = hard = torch.zeros(())
        for token in range(len(text.response.prompt), len(line)):
            i = token - k - 1
            if i < 0:
                continue
            truth = text.features[i + k].float()
            near = near + F.smooth_l1_loss(out[i].float(), truth)
            weight = loss.head.head.scores.weight.float()
            teacher = (weight @ truth).softmax(dim=-1)
            scores = weight @ out[i].float()
            softer = (scores / settings.soft_temperature).log_softmax(dim=-1)
            soft = soft - (teacher * softer).sum()
            hard = hard - scores.log_softmax(dim=-1)[loss.head.head.indices()[line[token]]]
        return near, soft, hard

    @pytest.mark.parametrize("k", [1, 2, 3])
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_by_hand(
        self, model: PreTrainedModel, texts: list[Text], k: int, temperature: float
    ) -> None:
        text = texts[3]
        for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (2.0, 0.3, 0.7)):
            settings = CsgdSettings("off", "off", "token", "data", *weights, temperature)
            loss = make_loss(model, settings, k)
            found, count = loss(MicroBatch([text], seed=3))
            assert count == len(text.response.response) - max(0, k - len(text.response.prompt) + 1)
            parts = self.expected(loss, text, settings, 3)
            wanted = sum(w * part for w, part in zip(weights, parts, strict=True))
            assert float(found.detach()) == pytest.approx(float(wanted), rel=2e-2)

    @pytest.mark.parametrize("k", [1, 2])
    def test_prompts_may_be_learned(
        self, model: PreTrainedModel, texts: list[Text], k: int
    ) -> None:
        settings = replace(PLAIN, learn_prompts=True)
        _, count = make_loss(model, settings, k)(MicroBatch([texts[3]], seed=3))
        assert count == texts[3].response.num_tokens - 1 - k

    def test_defaults_are_the_papers(self) -> None:
        settings = CsgdSettings()
        weights = (settings.feature_weight, settings.soft_weight, settings.hard_weight)
        assert weights == pytest.approx((1.0, 0.1 * 0.9, 0.1 * 0.1))

    def test_labels_outside_the_vocabulary_do_not_count(
        self, model: PreTrainedModel, texts: list[Text]
    ) -> None:
        settings = replace(PLAIN, feature_weight=0.0, soft_weight=0.0, hard_weight=1.0)
        answer = set(texts[0].response.response)
        outside = torch.tensor([t for t in range(model.config.vocab_size) if t not in answer])
        found, _ = make_loss(model, settings, vocabulary=outside)(MicroBatch(texts[:1]))
        assert float(found.detach()) == 0.0

    def test_a_gumbel_label_is_a_draw_from_the_target(
        self, model: PreTrainedModel, texts: list[Text]
    ) -> None:
        """The hard loss averages to the cross-entropy with the target's distribution."""
        settings = replace(PLAIN, feature_weight=0.0, soft_weight=0.0, hard_weight=1.0)
        drawn = make_loss(model, replace(settings, hard_label="gumbel"), 1)
        soft = make_loss(model, replace(settings, soft_weight=1.0, hard_weight=0.0), 1)
        values = [float(drawn(MicroBatch(texts[:1], seed=s))[0].detach()) for s in range(300)]
        expected = float(soft(MicroBatch(texts[:1]))[0].detach())
        spread = torch.tensor(values).std() / 300**0.5
        assert abs(sum(values) / 300 - expected) < 4 * float(spread)

    @pytest.mark.parametrize("schedule", ["off", "paper"])
    def test_a_batch_is_the_sum_of_its_texts(
        self,
        model: PreTrainedModel,
        texts: list[Text],
        schedule: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Padding has no effect, and the Hamming distance is counted per text."""

        def first_positions(first: int, stop: int, count: int, k: int, grid: int) -> list[int]:
            return [i for i in range(first, stop - k + 2) if i % k == grid][:count]

        # Only the random draw of positions depends on the other texts of the batch.
        monkeypatch.setattr(csgd, "replaced_positions", first_positions)
        loss = make_loss(model, replace(PLAIN, schedule=schedule))
        batch = [texts[0], texts[4], texts[2]]
        assert len({len(text.response.prompt) for text in batch}) == 3
        parameters = list(loss.head.trained().values())

        def run(some: list[Text]) -> tuple[float, int, list[Tensor]]:
            value, count = loss(MicroBatch(some, seed=1))
            grads = torch.autograd.grad(value, parameters)
            return float(value.detach()), count, list(grads)

        whole, parts = run(batch), [run([text]) for text in batch]
        assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=5e-3)
        assert whole[1] == sum(part[1] for part in parts)
        for position, grad in enumerate(whole[2]):
            total = torch.stack([part[2][position] for part in parts]).sum(dim=0)
            assert float((grad - total).norm()) <= 0.03 * float(total.norm()) + 1e-6

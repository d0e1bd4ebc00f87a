"""`generate()` with the kernels: the same tokens, and every op is launched.

On the CPU, the tests select the interpreted kernels; on a GPU, the kernels are the default.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import hf_spec_kernels
import pytest
import torch
from hf_spec_kernels import launches, using
from transformers import PreTrainedModel

import hf_spec
from hf_spec.backend.device.capture import cuda_graphs
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.methods.disco.classifier import draft_features
from hf_spec.methods.falcon.csgd import CsgdSettings, GlancingLoss
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.training.features import Text, text_features
from hf_spec.training.responses import Response
from hf_spec.training.trainer import MicroBatch
from tests import tiny_models
from tests.compiler import needs_compiler


@pytest.fixture
def kernels(device: torch.device) -> Iterator[None]:
    """Run every op's kernel, without graphs, whose replays are not counted; reset the counters."""
    launches.clear()
    with using("triton") if device.type == "cpu" else nullcontext(), cuda_graphs("off"):
        yield


def on(device: torch.device, model: PreTrainedModel) -> PreTrainedModel:
    return model if device.type == "cpu" else copy.deepcopy(model).to(device)


def prompts(name: str, device: torch.device, rows: int) -> dict[str, Any]:
    """Return settled text, so that drafts are accepted, in rows of different lengths.

    The texts are short because the interpreter is slow.
    """
    settled = tiny_models.settled_prompt(name)[0, -24:]
    batch = tiny_models.left_padded([settled[: len(settled) - 9 * row] for row in range(rows)])
    return {key: value.to(device) for key, value in batch.items()}


def generate(
    name: str,
    strategy: dict[str, Any],
    device: torch.device,
    rows: int = 1,
    tokens: int = 4,
    **options: Any,
) -> Any:
    """Return the output with a strategy; check that it equals that of plain `generate()`."""
    model = on(device, tiny_models.build(name))
    call = {**prompts(name, device, rows), "max_new_tokens": tokens, "do_sample": False, **options}
    before = launches.copy()
    plain = model.generate(**call)
    assert launches == before, "plain generate launches nothing"
    output = model.generate(**call, **strategy, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    return output


# A plain model; windows in some layers and a softcap; windows and sinks.
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_lookup_says_what_the_model_says(name: str, device: torch.device, kernels: None) -> None:
    output = generate(name, {"spec_strategy": "lookup"}, device)
    assert output.spec_stats.drafted_tokens > 0
    layers = tiny_models.build(name).config.num_hidden_layers
    expected = layers * output.spec_stats.target_forwards
    assert launches["ragged_tree_attention"] == launches["kv_write"] == expected


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_cpu_attends_by_its_own_kernel(name: str) -> None:
    """The kernel is the default, and takes rows of different lengths in one call per layer."""
    launches.clear()
    output = generate(name, {"spec_strategy": "lookup"}, torch.device("cpu"), rows=3)
    layers = tiny_models.build(name).config.num_hidden_layers
    expected = layers * output.spec_stats.target_forwards
    assert launches["ragged_tree_attention"] == launches["kv_write"] == expected
    with using("torch"):
        other = generate(name, {"spec_strategy": "lookup"}, torch.device("cpu"), rows=3)
    assert torch.equal(other.sequences, output.sequences)
    assert launches["ragged_tree_attention"] == expected


def test_ragged_trees_launch_every_op_of_a_step(device: torch.device, kernels: None) -> None:
    assistant = on(device, tiny_models.draft_model("llama"))
    strategy = {"spec_strategy": "tree", "assistant": assistant}
    output = generate("llama", strategy, device, rows=2)
    assert output.spec_stats.accepted_tokens > 0
    assert launches.keys() >= {"ragged_tree_attention", "kv_write", "kv_keep", "verify_tree"}


def test_end_of_sequence_inside_a_draft(device: torch.device, kernels: None) -> None:
    """Verification on the device continues after it; the output ends there."""
    model = tiny_models.build("llama")
    settled = prompts("llama", torch.device("cpu"), 1)["input_ids"]
    end = int(model.generate(settled, max_new_tokens=3, do_sample=False)[0, -1])
    output = generate("llama", {"spec_strategy": "lookup"}, device, tokens=8, eos_token_id=end)
    assert output.sequences[0, -1] == end
    assert output.sequences.shape[1] <= settled.shape[1] + 3
    assert launches["verify_tree"] > 0


def test_processors_and_scores_take_the_verifier_on_the_host(
    device: torch.device, kernels: None
) -> None:
    strategy = {"spec_strategy": "lookup", "output_logits": True}
    generate("llama", strategy, device)
    assert launches["verify_tree"] == 0
    assert launches["ragged_tree_attention"] > 0


def test_a_falcon_head_uses_them_too(device: torch.device, kernels: None) -> None:
    """Tokens of a block attend to later ones of the block, unlike in a causal mask."""
    if device.type == "cuda":
        pytest.skip("its adapter is made for the model on the CPU")
    config = hf_spec.FalconConfig(tree=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    assistant = tiny_models.speculation("llama", "falcon")["assistant"]
    output = generate("llama", {"spec_strategy": config, "assistant": assistant}, device)
    layers = tiny_models.build("llama").config.num_hidden_layers
    assert launches["kv_write"] > layers * output.spec_stats.target_forwards


def test_features_of_drafts(device: torch.device, kernels: None) -> None:
    torch.manual_seed(0)
    probs = torch.randn(3, 97, device=device).softmax(dim=-1)
    positions = torch.arange(3, device=device)
    found = draft_features(probs, positions)
    assert launches["draft_features"] == 1
    with using("torch"):
        torch.testing.assert_close(found, draft_features(probs, positions))
    assert launches["draft_features"] == 1


def test_a_move_of_several_rows_is_one_launch_a_kind(device: torch.device, kernels: None) -> None:
    torch.manual_seed(0)
    pools = [KVPool(3), KVPool(3)]
    states = torch.randn(3, 2, 20, 8, device=device), torch.randn(3, 2, 20, 6, device=device)
    for pool in pools:
        for layer in range(4):
            for buffer, state in zip(pool.layer(layer, *states), states, strict=True):
                buffer[:, :, :20] = state + layer
    moves = [(2, [7, 9], 5), (0, [11, 12, 19], 10)]
    pools[0].move_rows(moves)
    assert launches["kv_keep"] == 2
    pools[0].move_rows([])
    with using("torch"):
        pools[1].move_rows(moves)
    assert launches["kv_keep"] == 2
    for layer in range(4):
        assert torch.equal(pools[0].keys[layer], pools[1].keys[layer])
        assert torch.equal(pools[0].values[layer], pools[1].values[layer])


@pytest.mark.parametrize("temperature", [1.0, 0.95])
def test_the_loss_of_a_falcon_head(temperature: float, device: torch.device, kernels: None) -> None:
    model = on(device, tiny_models.build("llama"))
    responses = [Response("a", "t", [1, 2, 3, 4], [5, 6, 7, 8, 9, 10])]
    with torch.no_grad():
        texts = [Text(responses[0], *text_features(model, responses))]
    settings = CsgdSettings(
        schedule="off", noise="off", soft_weight=0.3, hard_weight=0.2, soft_temperature=temperature
    )
    torch.manual_seed(0)
    head = FalconHead(model, FalconShape(2, dropout=0.0), torch.arange(0, 97, 2)).to(device).train()
    loss = GlancingLoss(head, model, settings, 4, feature_size=1.0)
    found = []
    for impl in ("auto", "torch"):
        with using(impl) if impl == "torch" else nullcontext():
            value, _ = loss(MicroBatch(texts, 0, 0))
        value.backward()
        gradients = [p.grad.clone() for p in head.parameters() if p.grad is not None]
        head.zero_grad()
        found.append((value.detach(), gradients))
    assert launches["distill_loss"] == 1
    (ours, our_gradients), (theirs, their_gradients) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert len(our_gradients) > 3
    for one, other in zip(our_gradients, their_gradients, strict=True):
        # Gradients pass through layers in bfloat16.
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)


@pytest.mark.gpu
def test_a_layer_need_not_be_on_the_current_device(device: torch.device) -> None:
    """Models spread over GPUs run their layers without changing the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    probs = torch.full((2, 8), 0.125, device=torch.device("cuda", 1))
    assert torch.cuda.current_device() == 0
    assert torch.equal(hf_spec_kernels.draft_features(probs)[:, :8], probs)

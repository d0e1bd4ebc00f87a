"""8-bit and 4-bit bitsandbytes targets on the CPU: same tokens as the quantized model alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from hf_spec_kernels import launches
from torch import nn

import hf_spec
from hf_spec import UnsupportedError
from hf_spec.adapters.folder import BaseModel, save_adapter
from hf_spec.backend.cpu.eight_bit import is_eight_bit
from hf_spec.backend.cpu.four_bit import is_four_bit
from hf_spec.backend.cpu.packed_weights import cpu_packing_bytes
from hf_spec.backend.device.placement import dense_copy, looks_for_outliers
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.methods.draft_model.trained import TrainableDraft
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead
from hf_spec.methods.registry import parse_strategy
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.targets.cases import NEW_TOKENS, SEED, assert_same_up_to_ties
from tests.tiny_models import VOCAB, random_adaptive_tokens, repetitive_prompt, wide_tree

pytest.importorskip("bitsandbytes")

KINDS = ("8bit", "nf4", "fp4-nested")
STRATEGIES = ("lookup", "draft", "tree", "gsd", "disco", "falcon", "sdsat", "trained draft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose layers are as wide as a block of 4-bit weights."""
    torch.manual_seed(0)
    config = T.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("dense")
    T.LlamaForCausalLM(config).save_pretrained(path)
    return path


@cache
def load(folder: Path, kind: str = "dense", dtype: torch.dtype = torch.float32) -> Any:
    configs: dict[str, Any] = {
        "dense": None,
        "8bit": T.BitsAndBytesConfig(load_in_8bit=True),
        "nf4": T.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
        "fp4-nested": T.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=True,
        ),
    }
    # The 8-bit layers log in every call that they cast their inputs.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    model = T.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=configs[kind], dtype=dtype
    ).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


def prompt_of(folder: Path) -> torch.Tensor:
    return load(folder).generate(repetitive_prompt(), max_new_tokens=30, do_sample=False)


def speculation(folder: Path, model: Any, strategy: str, out: Path) -> dict[str, Any]:
    """Return arguments for a strategy; adapters are built from the dense model."""
    dense = load(folder)
    torch.manual_seed(SEED)
    if strategy == "falcon":
        head = FalconHead(dense, FalconShape(), torch.arange(0, VOCAB, 2))
        save_adapter(out, head.to_adapter({}))
        return {"spec_strategy": hf_spec.FalconConfig(tree=wide_tree()), "assistant": out}
    if strategy == "trained draft":
        save_adapter(out, TrainableDraft(dense, 2, 4, torch.arange(0, VOCAB, 2)).to_adapter({}))
        return {"spec_strategy": "tree", "assistant": out}
    if strategy == "disco":
        tiny_models.save_disco_adapter(out, dense)
        return {"spec_strategy": "disco", "assistant": out}
    if strategy == "sdsat":
        config = hf_spec.SdsatConfig(tree=wide_tree())
        return {"spec_strategy": config, "assistant": random_adaptive_tokens(dense)}
    if strategy == "lookup":
        return {"spec_strategy": "lookup"}
    return {"spec_strategy": strategy, "assistant": hf_spec.truncated_draft(model, 2)}


@pytest.mark.by_default(strategy=("lookup", "falcon"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_output_up_to_ties(kind: str, strategy: str, folder: Path, tmp_path: Path) -> None:
    model, prompt = load(folder, kind), prompt_of(folder)
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(prompt, **call)
    arguments = speculation(folder, model, strategy, tmp_path)
    ran = launches.copy()
    output = model.generate(prompt, **call, **arguments, return_dict_in_generate=True)
    for kernel, is_run in (("four_bit_linear", is_four_bit), ("eight_bit_linear", is_eight_bit)):
        assert (launches[kernel] > ran[kernel]) == any(map(is_run, model.modules()))
    stats = output.spec_stats
    assert strategy == "lookup" or stats.accepted_tokens > 0
    assert_same_up_to_ties(model, prompt, plain[0].tolist(), output.sequences[0].tolist())


@pytest.mark.parametrize("kind", ["nf4", "fp4-nested"])
def test_weights_that_bitsandbytes_leaves_as_they_are(kind: str, folder: Path) -> None:
    """Weights that bitsandbytes does not rearrange, as on processors without AVX512-BF16."""
    model, prompt = load.__wrapped__(folder, kind), prompt_of(folder)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(prompt, **call)
    ran = launches["four_bit_linear"]
    output = model.generate(prompt, **call, spec_strategy="lookup", return_dict_in_generate=True)
    assert (launches["four_bit_linear"] > ran) == any(map(is_four_bit, model.modules()))
    assert output.spec_stats.rounds > 0
    assert_same_up_to_ties(model, prompt, plain[0].tolist(), output.sequences[0].tolist())


@needs_compiler
@pytest.mark.parametrize("strategy", ["none", "lookup", "tree"])
@pytest.mark.parametrize("kind", ["nf4", "8bit"])
def test_compiled_layers_compute_the_same_bits(kind: str, strategy: str, folder: Path) -> None:
    """Layers with 4-bit weights that our kernel does not support here run uncompiled."""
    model, prompt = load.__wrapped__(folder, kind, torch.bfloat16), prompt_of(folder)
    for layer in model.model.layers:
        # Also cover a bias.
        layer.mlp.down_proj.bias = nn.Parameter(torch.randn(64).to(torch.bfloat16))
    config = parse_strategy(strategy)
    assistant = hf_spec.truncated_draft(model, 1) if strategy == "tree" else None
    found = [
        model.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            spec_strategy=replace(config, compile=compiled),
            assistant=assistant,
        )
        for compiled in (False, True)
    ]
    layers = CompiledLayers.of(model).layers
    up = model.model.layers[0].mlp.up_proj
    packed = kind == "8bit" or up.support_avx512bf16_for_cpu
    assert layers
    assert all(layer.is_compiled for layer in layers) == packed
    assert torch.equal(found[0].sequences, found[1].sequences)
    for one, other in zip(found[0].logits, found[1].logits, strict=True):
        assert torch.equal(one, other)


@needs_compiler
def test_one_function_is_compiled_whatever_bitsandbytes_stores(folder: Path) -> None:
    """A prompt with outliers changes the state that bitsandbytes stores in an 8-bit layer."""
    model = load.__wrapped__(folder, "8bit", torch.bfloat16)
    for module in model.modules():
        if is_eight_bit(module):
            module.state.threshold = 2.0
    config = replace(parse_strategy("lookup"), compile=True)
    for prompt in prompt_of(folder).split(7, dim=1):
        model.generate(prompt, max_new_tokens=4, do_sample=False, spec_strategy=config)
    assert len(CompiledLayers.of(model).functions) == 1
    assert all(layer.is_compiled for layer in CompiledLayers.of(model).layers)


def test_a_draft_changes_no_outliers_of_a_prompt(folder: Path) -> None:
    """An outlier of one token changes how others of the same forward pass are rounded."""
    model, prompt = load.__wrapped__(folder, "8bit"), prompt_of(folder)
    for module in model.modules():
        if looks_for_outliers(module):
            module.state.threshold = 2.0
    call = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(prompt, do_sample=False, **call)
    output = model.generate(prompt, do_sample=False, **call, spec_strategy="lookup")
    assert torch.equal(output.logits[0], plain.logits[0])
    assert torch.equal(output.sequences, plain.sequences)


@needs_compiler
def test_eight_bits_in_float32_run_uncompiled(folder: Path) -> None:
    """A rounding difference in a norm could change quantized inputs by a whole step."""
    refused = hf_spec.compile(load.__wrapped__(folder, "8bit")).refused
    assert len(refused) == 3
    assert "8-bit weights, which are compiled in bfloat16" in refused["model.layers.0"]


@needs_compiler
@pytest.mark.parametrize("kind", ["nf4", "8bit"])
def test_a_changed_weight_is_read_by_compiled_layers(kind: str, folder: Path) -> None:
    model, prompt = load.__wrapped__(folder, kind, torch.bfloat16), prompt_of(folder)
    config = replace(parse_strategy("none"), compile=True)
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "spec_strategy": config}
    before = model.generate(prompt, **call)
    other = load.__wrapped__(folder, kind, torch.bfloat16)
    with torch.no_grad():
        other.generate(prompt, max_new_tokens=1)
        for mine, theirs in zip(model.model.layers, reversed(other.model.layers), strict=True):
            if kind == "nf4":
                mine.mlp.up_proj = theirs.mlp.up_proj
            else:
                mine.mlp.up_proj.state.SCB = theirs.mlp.up_proj.state.SCB
    after = model.generate(prompt, **call)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(prompt, **{**call, "spec_strategy": "none"}))


def test_quantization_changes_the_output(folder: Path) -> None:
    """Otherwise the tests above would also pass with the weights of the dense model."""
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    said = {kind: load(folder, kind).generate(prompt_of(folder), **call) for kind in KINDS}
    dense = load(folder).generate(prompt_of(folder), **call)
    assert any(tokens.tolist() != dense.tolist() for tokens in said.values())


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_are_not_packed(kind: str, folder: Path) -> None:
    model = load(folder, kind)
    hf_spec.clear_cpu_packing()
    with install_packed_linears(model), use_packed_linears():
        changed = {name for name, m in model.named_modules() if "forward" in m.__dict__}
        in_place = {n for n, m in model.named_modules() if is_four_bit(m) or is_eight_bit(m)}
        assert changed - in_place <= {"lm_head"}
        assert cpu_packing_bytes() <= model.lm_head.weight.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_know_the_base_by_its_embedding(kind: str, folder: Path) -> None:
    BaseModel.of(load(folder)).check(load(folder, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_dense_copies(kind: str, folder: Path) -> None:
    """Dense copies compute the same as the quantized layers, up to the rounding of matmuls."""
    layers = load(folder, kind).model.layers
    layers[0].mlp.up_proj(torch.zeros(1, 64))
    copied = dense_copy(layers, torch.float32)
    for name, module in copied.named_modules():
        assert type(module) in (nn.Linear, type(layers.get_submodule(name)))
        assert all(p.dtype == torch.float32 for p in module.parameters())
    inputs = torch.randn(5, 64)
    wanted, got = layers[0].mlp.up_proj(inputs), copied[0].mlp.up_proj(inputs)
    assert (wanted - got).norm() < 0.02 * wanted.norm()


def test_a_quantized_head_cannot_be_cut(folder: Path) -> None:
    layer = load(folder, "8bit").model.layers[0].mlp.up_proj
    with pytest.raises(UnsupportedError, match="exclude embedding and head"):
        FewTokensHead(layer, torch.arange(4))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, strategy: str, folder: Path, tmp_path: Path) -> None:
    model = load(folder, kind, torch.bfloat16)
    assert model.device.type == "cuda"
    prompt = prompt_of(folder).cuda()
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(prompt, **call)
    got = model.generate(prompt, **call, **speculation(folder, model, strategy, tmp_path))
    assert_same_up_to_ties(model, prompt, plain[0].tolist(), got[0].tolist())

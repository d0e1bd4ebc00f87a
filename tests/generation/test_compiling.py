"""`hf_spec.compile`: its report, machines without a compiler, and turning it off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_spec_kernels.build import BuildError

import hf_spec
from hf_spec.engine.fast import layer_tracing as layer_programs
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from tests import tiny_models
from tests.compiler import needs_compiler

pytestmark = needs_compiler


def model(name: str = "llama") -> Any:
    return copy.deepcopy(tiny_models.build(name))


def test_a_second_call_has_nothing_to_compile() -> None:
    target = model()
    first, second = hf_spec.compile(target), hf_spec.compile(target)
    assert first.seconds > 0 == second.seconds
    assert (second.layers, second.programs) == (first.layers, first.programs) == (3, 1)


def test_a_second_call_says_again_what_is_refused() -> None:
    target = model("llama4")
    first, second = hf_spec.compile(target), hf_spec.compile(target)
    assert (first.layers, len(first.refused)) == (0, 3)
    assert second.refused == first.refused


def test_off_lets_the_layers_run_as_they_are() -> None:
    target = model()
    hf_spec.compile(target)
    assert hf_spec.compile(target, "off").layers == 0
    with CompiledLayers.of(target).active(target):
        assert not [m for m in target.modules() if "forward" in m.__dict__]
    assert hf_spec.compile(target).layers == 3


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(text: str) -> Any:
        raise BuildError("no C++ compiler was found")

    monkeypatch.setattr(layer_programs, "build_layer", missing)
    target = model()
    report = hf_spec.compile(target)
    assert (report.layers, report.programs) == (0, 0)
    assert set(report.refused.values()) == {"no C++ compiler was found"}
    given = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(**given, spec_strategy="lookup"), target.generate(**given))


def test_models_that_take_no_attention_function_are_told_so() -> None:
    report = hf_spec.compile(model("falcon_gqa"))
    assert report.layers == 0
    assert list(report.refused.values()) == ["it takes no attention function"]


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(hf_spec.OptionError, match="mode='auto'"):
        hf_spec.compile(model(), "auto")


@pytest.mark.parametrize("call", ["generate", "generate_batch"])
def test_the_option_of_a_strategy_compiles(call: str) -> None:
    target = model()
    target.generation_config.spec_strategy = {"strategy": "lookup", "compile": True}
    given = {"max_new_tokens": 8, "do_sample": False}
    if call == "generate":
        prompt = tiny_models.prompts("llama", "one")
        plain = target.generate(**prompt, **given, spec_strategy="none")
        assert torch.equal(target.generate(**prompt, **given), plain)
    else:
        target.generate_batch([[5, 6, 7]], **given)
    assert [layer.is_compiled for layer in CompiledLayers.of(target).layers] == [True] * 3


def test_only_the_first_call_warms_up() -> None:
    target, forwards = model(), []
    target.register_forward_pre_hook(lambda *_: forwards.append(None))
    config = hf_spec.NoneConfig(compile=True)

    def call() -> int:
        forwards.clear()
        options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 8}
        prompt = tiny_models.prompts("llama", "one")
        stats = target.generate(**prompt, **options, spec_strategy=config).spec_stats
        return len(forwards) - stats.target_forwards

    assert [call() for _ in range(3)] == [4, 0, 0]
    # An explicit compile() runs a new trial for its report.
    forwards.clear()
    hf_spec.compile(target)
    assert len(forwards) == 2


def test_nothing_is_compiled_for_a_call_that_is_refused() -> None:
    target = model()
    with pytest.raises(hf_spec.AssistantError, match="needs assistant"):
        target.generate(torch.tensor([[5]]), spec_strategy=hf_spec.DraftConfig(compile=True))
    assert not CompiledLayers.of(target).layers


def test_the_option_is_a_flag() -> None:
    with pytest.raises(hf_spec.OptionError, match="compile='auto' must be True or False"):
        hf_spec.LookupConfig(compile="auto")  # type: ignore[arg-type]

"""The type HF_SPEC is registered with PEFT when PEFT is imported, not earlier."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_spec
from hf_spec.generation.peft_hook import _AfterImport
from tests.adapters.samples import fresh_model, save_sample
from tests.forked_python import ForkedPython
from tests.tiny_models import build


def test_disable_gives_load_adapter_back(tmp_path: Path) -> None:
    hf_spec.disable()
    try:
        assert not hasattr(type(build("llama")).load_adapter, "_hf_spec_wrapped")
    finally:
        hf_spec.enable()
        hf_spec.enable()
    assert hasattr(type(build("llama")).load_adapter, "_hf_spec_wrapped")
    fresh_model().load_adapter(save_sample(tmp_path, "disco"))


# For a new process: `find_spec("peft")` does not import PEFT.
FIRST = """
import sys, hf_spec, importlib.util
assert importlib.util.find_spec("peft") and "peft" not in sys.modules
"""
KNOWN = """
import peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as known
kind = peft.PeftType("HF_SPEC")
assert kind in list(peft.PeftType) and kind in known and kind == "HF_SPEC"
assert peft.PeftType["HF_SPEC"] is kind and peft.PeftType.HF_SPEC is kind
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "imports", [FIRST, "import peft, hf_spec", "import hf_spec.generation.peft_type"]
)
def test_the_type_is_known_whoever_comes_first(imports: str, new_python: ForkedPython) -> None:
    done = new_python.run(imports + KNOWN)
    assert done.status == 0, done.err


class TestAfterImport:
    @pytest.fixture
    def heard(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
        """Record after each import whether the module was complete."""
        (tmp_path / "late_module.py").write_text("value = 1\n")
        (tmp_path / "other_module.py").write_text("value = 2\n")
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("late_module", "other_module"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        heard: list[bool] = []
        finder = _AfterImport(
            "late_module", lambda: heard.append(hasattr(sys.modules["late_module"], "value"))
        )
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        return heard

    def test_the_module_is_whole_by_then(self, heard: list[bool]) -> None:
        import late_module

        assert late_module.value == 1
        assert heard == [True]

    def test_a_question_and_other_modules_say_nothing(self, heard: list[bool]) -> None:
        import other_module

        assert other_module.value == 2
        assert find_spec("late_module") is not None
        assert heard == []

    def test_a_module_that_is_not_there(self, heard: list[bool], tmp_path: Path) -> None:
        (tmp_path / "late_module.py").unlink()
        assert find_spec("late_module") is None
        with pytest.raises(ModuleNotFoundError):
            import late_module  # noqa: F401
        assert heard == []

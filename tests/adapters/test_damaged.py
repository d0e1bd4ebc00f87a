"""About 200 damaged adapters raise the documented error and leave no side effects.

Each starts as an intact adapter in a folder. A damage changes its files, which are then passed to
`SpecAdapter`, `generate`, `model.load_adapter` and `PeftModel.from_pretrained`.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_spec import AssistantError, SpecAdapter
from hf_spec.adapters.folder import CONFIG_NAME, WEIGHTS_NAME
from tests.adapters.samples import METHODS, PROMPT, fresh_model, plain, sample, save_sample
from tests.model_watch import count_forwards, snapshot

Damage = Callable[[Path], None]
# Name -> damage, for instance one per value of a config field.
Damages = dict[str, Damage]

NAN, INF = float("nan"), float("inf")
# Values of wrong types and sizes, for any field of a config.
ODD: list[Any] = [None, "", "x", -1, 0, 2.5, 10**9, 10**30, NAN, INF, True, [], {}, [[[]]]]


class Trap:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def edit(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Return a damage that changes the parsed config."""

    def damage(folder: Path) -> None:
        path = folder / CONFIG_NAME
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return damage


def put(value: Any, *path: str) -> Damage:
    """Return a damage that sets a config field to a value."""

    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return edit(change)


def each(values: Iterable[Any], *path: str) -> Damages:
    """Return damages that set a config field to each of the values."""
    return {f"{value!r:.9}": put(value, *path) for value in values}


def drop(*path: str) -> Damage:
    """Return a damage that removes a config field."""

    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return edit(change)


def write(name: str, content: bytes) -> Damage:
    """Return a damage that replaces the content of a file."""
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(name: str, keep: float) -> Damage:
    """Return a damage that keeps only the first `keep` (0 to 1) of a file."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def link(name: str, target: str) -> Damage:
    """Return a damage that replaces a file with a link."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def moved_out(name: str) -> Damage:
    """Return a damage that moves a file out of the folder and links to it."""

    def damage(folder: Path) -> None:
        outside = folder.parent / f"outside_{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside.resolve())

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Return a damage that changes the tensors."""

    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS_NAME)
        change(found)
        save_file({n: t.contiguous() for n, t in found.items()}, folder / WEIGHTS_NAME)

    return damage


def one(change: Callable[[torch.Tensor], torch.Tensor], index: int) -> Damage:
    """Return a damage that changes one floating-point tensor, by its index `index`."""

    def damage(found: dict[str, torch.Tensor]) -> None:
        names = sorted(name for name, tensor in found.items() if tensor.is_floating_point())
        name = names[index % len(names)]
        found[name] = change(found[name])

    return tensors(damage)


def header(size: int, content: bytes = b"{}") -> bytes:
    """Return a safetensors file with a declared header size of `size` bytes."""
    return struct.pack("<Q", size) + content


def pickled(name: str) -> Damage:
    """Return a damage that replaces the weights with a pickle that runs code, saved as `name`."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS_NAME).unlink()
        torch.save(Trap(str(folder.parent / "executed")), folder / name)

    return damage


def fifo(name: str) -> Damage:
    """Return a damage that replaces a file with a pipe that blocks every reader."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def folder_for(name: str) -> Damage:
    """Return a damage that replaces a file with a folder."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def noise(seed: int) -> Damage:
    """Return a damage that overwrites part of the weights' header with random bytes."""

    def damage(folder: Path) -> None:
        drawn = random.Random(seed)
        content = bytearray((folder / WEIGHTS_NAME).read_bytes())
        length = struct.unpack("<Q", content[:8])[0]
        start = drawn.randrange(8, 8 + length // 2)
        content[start : start + 40] = drawn.randbytes(40)
        (folder / WEIGHTS_NAME).write_bytes(bytes(content))

    return damage


# Damages for any adapter that make its config unreadable. PEFT and transformers then cannot detect
# that the adapter is one of ours, and raise their own errors.
UNREADABLE: dict[str, Damage] = {
    "no config": lambda folder: (folder / CONFIG_NAME).unlink(),
    "config cut": cut(CONFIG_NAME, 0.5),
    "config empty": write(CONFIG_NAME, b""),
    "config binary": write(CONFIG_NAME, b"\xff\xfe\x00" * 9),
    "config a list": write(CONFIG_NAME, b"[1, 2]"),
    "config a number": write(CONFIG_NAME, b"3"),
    "config nested deep": write(CONFIG_NAME, b"[" * 200_000),
    "config a folder": folder_for(CONFIG_NAME),
    "config a dangling link": link(CONFIG_NAME, "/nowhere/at/all"),
    "config linked in a ring": link(CONFIG_NAME, CONFIG_NAME),
    "no type": drop("peft_type"),
    "unknown type": put("NO_SUCH", "peft_type"),
    "type of a wrong type": put(["HF_SPEC"], "peft_type"),
}
COMMON: dict[str, Damage | Damages] = {
    "config a link out": moved_out(CONFIG_NAME),
    "config too large": edit(lambda config: config.update(padding="x" * (5 << 20))),
    "no weights": lambda folder: (folder / WEIGHTS_NAME).unlink(),
    "weights empty": write(WEIGHTS_NAME, b""),
    "weights cut": cut(WEIGHTS_NAME, 0.9),
    "weights cut in the header": cut(WEIGHTS_NAME, 0.01),
    "weights with more after them": lambda folder: (
        (folder / WEIGHTS_NAME).open("ab").write(b"more") and None
    ),
    "weights a text": write(WEIGHTS_NAME, b"version https://git-lfs.github.com/spec/v1\n"),
    "header of 2**60": write(WEIGHTS_NAME, header(2**60)),
    "header of 101 MB": write(WEIGHTS_NAME, header(101 << 20)),
    "header beyond the file": write(WEIGHTS_NAME, header(1000)),
    "header no JSON": write(WEIGHTS_NAME, header(4, b"{{{{")),
    "offsets beyond the file": write(
        WEIGHTS_NAME, header(57, b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}  ')
    ),
    "weights of an odd type": write(
        WEIGHTS_NAME,
        header(57, b'{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}') + b"\0",
    ),
    "no weight at all": tensors(lambda found: found.clear()),
    "weights a link out": moved_out(WEIGHTS_NAME),
    "weights linked to a device": link(WEIGHTS_NAME, "/dev/zero"),
    "weights linked upwards": link(WEIGHTS_NAME, "../../../../etc/hostname"),
    "weights a pipe": fifo(WEIGHTS_NAME),
    "weights a folder": folder_for(WEIGHTS_NAME),
    "weights a pickle": pickled(WEIGHTS_NAME),
    "weights a pickle beside": pickled("adapter_model.bin"),
    "weights a pickle of another name": pickled("weights.pt"),
    "unknown method": put("../../medusa", "method"),
    "no method": drop("method"),
    "no options": drop("options"),
    "no base": drop("base"),
    "no fingerprint": drop("base", "fingerprint"),
    "no hidden size": drop("base", "hidden_size"),
    "fingerprint short": put([0.1] * 31, "base", "fingerprint"),
    "fingerprint of NaN": put([NAN] * 32, "base", "fingerprint"),
    "fingerprint infinite": put([INF] * 32, "base", "fingerprint"),
    "fingerprint of texts": put(["0.1"] * 32, "base", "fingerprint"),
    "fingerprint of another": put([0.5] * 32, "base", "fingerprint"),
    "fingerprint nested": put([[0.1]] * 32, "base", "fingerprint"),
    "more in the base": put(1, "base", "odd"),
    "hidden size": each((31, 64, -1, "32", 32.0), "base", "hidden_size"),
    "vocabulary": each((96, 98, 10**12, None), "base", "vocab_size"),
    "layers": each((2, 4, True), "base", "num_layers"),
    "method": each((None, 3, [], ""), "method"),
    "options": each((None, 3, [], "x", [["a", 1]]), "options"),
    "base": each((None, 3, [], "x", {}), "base"),
    "a weight of NaN": {str(index): one(lambda t: t * NAN, index) for index in (0, 3)},
    "a weight infinite": one(lambda t: t.fill_(INF), 1),
    "a weight of integers": one(lambda t: t.int(), 0),
    "a weight of bytes": one(lambda t: t.to(torch.uint8), 1),
    "a weight in float64": one(lambda t: t.double(), 2),
    "a weight complex": one(lambda t: t.to(torch.complex64), 0),
    "a weight transposed": one(lambda t: t[None].transpose(0, -1), 1),
    "a weight too long": one(lambda t: torch.cat([t, t]), 0),
    "a weight too short": one(lambda t: t[:-1], 2),
    "a weight without numbers": one(lambda t: t[:0], 0),
    "a weight too many": tensors(lambda found: found.update(odd=torch.zeros(2))),
    "a weight with a path for a name": tensors(
        lambda found: found.update({"../../../tmp/x": torch.zeros(2)})
    ),
    "a weight lacking": tensors(lambda found: found.pop(min(found))),
    "a weight renamed": tensors(lambda found: found.update(odd=found.pop(max(found)))),
    "noise": {str(seed): noise(seed) for seed in range(4)},
}


def odd_options(path: tuple[str, ...], allowed: tuple[Any, ...] = ()) -> dict[str, Damages]:
    """Return damages that set an option to each odd value except the allowed ones."""
    odd = [
        value
        for value in ODD
        if not any(value is one or (value == one and type(value) is type(one)) for one in allowed)
    ]
    return {".".join(path): each(odd, "options", *path)}


OWN: dict[str, dict[str, Damage | Damages]] = {
    "draft": {
        **odd_options(("num_layers",)),
        **odd_options(("rank",)),
        "no rank": drop("options", "rank"),
        "as many layers as the base": put(3, "options", "num_layers"),
        "another depth": put(1, "options", "num_layers"),
        "another rank": put(3, "options", "rank"),
        "tokens beyond the vocabulary": tensors(
            lambda found: found.update(vocabulary=found["vocabulary"] + 50)
        ),
        "tokens below zero": tensors(
            lambda found: found.update(vocabulary=found["vocabulary"] - 1)
        ),
        "tokens in disorder": tensors(
            lambda found: found.update(vocabulary=found["vocabulary"].flip(0))
        ),
        "tokens twice": tensors(lambda found: found.update(vocabulary=found["vocabulary"] * 0)),
        "tokens as floats": tensors(
            lambda found: found.update(vocabulary=found["vocabulary"].float())
        ),
        "tokens as a table": tensors(
            lambda found: found.update(vocabulary=found["vocabulary"][None])
        ),
        "no tokens": tensors(lambda found: found.update(vocabulary=found["vocabulary"][:0])),
    },
    "disco": {
        **odd_options(("hidden_size",)),
        **odd_options(("features",)),
        "unknown features": put(["top_probs", "../x"], "options", "features"),
        "another width": put(31, "options", "hidden_size"),
        "no spread": tensors(lambda found: found.update(std=found["std"] * 0)),
    },
    "falcon": {
        **odd_options(("shape",)),
        **odd_options(("shape", "block_size")),
        **odd_options(("shape", "num_layers")),
        **odd_options(("shape", "recurrent"), (True,)),
        **odd_options(("shape", "dropout"), (0,)),
        "more in the shape": put(1, "options", "shape", "odd"),
        "more layers than the base": put(4, "options", "shape", "num_layers"),
        "tokens beyond the vocabulary": tensors(
            lambda found: found.update(vocabulary=torch.tensor([3, 97]))
        ),
    },
    "sdsat": {
        **odd_options(("mode",)),
        **odd_options(("diverse",), (True,)),
        **odd_options(("window",)),
        **odd_options(("num_adaptive",), (None,)),
        "an unmerged LoRA": put("lora", "options", "mode"),
        "embeddings with a LoRA": put("embeddings", "options", "mode"),
        "a LoRA of no layer": tensors(
            lambda found: found.update(
                {
                    "model.norm.lora_A.weight": torch.zeros(2, 32),
                    "model.norm.lora_B.weight": torch.zeros(32, 2),
                }
            )
        ),
    },
}

# Damages in options that are only checked when drafting, not when loading.
DRAFTING: dict[str, dict[str, Damage | Damages]] = {
    "disco": {
        **odd_options(("threshold",), (0, 1)),
        **odd_options(("max_draft_tokens",)),
        **odd_options(("draft",)),
        "a draft up the tree": put("../../../../etc", "options", "draft"),
        "a draft anywhere": put("/etc", "options", "draft"),
        "a draft at home": put("~/model", "options", "draft"),
        "a draft that hides it": put("models/../../../x", "options", "draft"),
        "a draft of more layers": put({"truncated": 9}, "options", "draft"),
        "a draft of no layers": put({"truncated": "2"}, "options", "draft"),
    },
    "falcon": {
        **odd_options(("tree",), (None,)),
        **odd_options(("max_depth",), (None, 10**9, 10**30)),
        **odd_options(("max_nodes",), (None, 10**9, 10**30)),
        "a tree of a wrong order": put([[0, 0]], "options", "tree"),
        "a tree deeper than the head": put([[0] * n for n in range(1, 7)], "options", "tree"),
    },
}


def cases(*tables: dict[str, dict[str, Damage | Damages]], common: Any = ()) -> list[Any]:
    """Return test parameters: damages of each method, and common ones spread over the methods.

    All values of one field form one case.
    """
    found = [(METHODS[index % 4], *item) for index, item in enumerate(dict(common).items())]
    for table in tables:
        found += [(method, *item) for method, damages in table.items() for item in damages.items()]
    return [
        pytest.param(
            method,
            damage if isinstance(damage, dict) else {name: damage},
            id=f"{method}: {name}",
        )
        for method, name, damage in found
    ]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return fresh_model()


@pytest.fixture
def untouched(model: PreTrainedModel, tmp_path: Path) -> Iterator[None]:
    """Check that the test changed no model, ran no forward pass and executed no code."""
    before, gradients = snapshot(model), [p.requires_grad for p in model.parameters()]
    modules = [name for name, _ in model.named_modules()]
    with count_forwards(model) as forwards:
        yield
    assert forwards == []
    assert snapshot(model) == before
    assert [p.requires_grad for p in model.parameters()] == gradients
    assert [name for name, _ in model.named_modules()] == modules
    assert not hasattr(model, "peft_config")
    assert not (tmp_path / "executed").exists()


@pytest.fixture(autouse=True)
def without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent repeated Hub requests for names that cannot be read locally."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def refused(call: Callable[[], Any], name: str = "") -> None:
    try:
        call()
    except AssistantError as error:
        assert len(str(error)) > 20, "a sentence"  # noqa: PT017 - the other way does not name it
    else:
        pytest.fail(f"{name} was accepted")


def generate(model: PreTrainedModel, folder: Path, method: str) -> None:
    model.generate(
        PROMPT, max_new_tokens=4, spec_strategy=sample(method).strategy, assistant=str(folder)
    )


@pytest.mark.usefixtures("untouched")
class TestDamaged:
    @pytest.mark.parametrize(("method", "damages"), cases(common=UNREADABLE))
    def test_unreadable_configs(
        self, model: PreTrainedModel, tmp_path: Path, method: str, damages: Damages
    ) -> None:
        [damage] = damages.values()
        folder = save_sample(tmp_path / "adapter", method)
        damage(folder)
        refused(lambda: SpecAdapter.from_pretrained(folder))
        refused(lambda: generate(model, folder, method))
        for load in (model.load_adapter, lambda name: PeftModel.from_pretrained(model, name)):
            with pytest.raises((OSError, ValueError, KeyError, TypeError, RecursionError)):
                load(str(folder))

    @pytest.mark.parametrize(("method", "damages"), cases(OWN, common=COMMON))
    def test_damaged_adapters(
        self, model: PreTrainedModel, tmp_path: Path, method: str, damages: Damages
    ) -> None:
        for number, (name, damage) in enumerate(damages.items()):
            folder = save_sample(tmp_path / f"adapter_{number}", method)
            damage(folder)
            refused(partial(generate, model, folder, method), name)
            refused(partial(model.load_adapter, str(folder)), name)
            refused(partial(PeftModel.from_pretrained, model, str(folder)), name)

    @pytest.mark.parametrize(("method", "damages"), cases(DRAFTING))
    def test_options_for_drafting(
        self, model: PreTrainedModel, tmp_path: Path, method: str, damages: Damages
    ) -> None:
        for number, (name, damage) in enumerate(damages.items()):
            folder = save_sample(tmp_path / f"adapter_{number}", method)
            damage(folder)
            refused(partial(generate, model, folder, method), name)


def test_there_are_two_hundred() -> None:
    found = cases(OWN, DRAFTING, common={**UNREADABLE, **COMMON})
    assert sum(len(case.values[1]) for case in found) >= 200


@pytest.mark.parametrize("method", METHODS)
def test_whole_ones_are_served(model: PreTrainedModel, tmp_path: Path, method: str) -> None:
    folder = save_sample(tmp_path, method)
    strategy = sample(method).strategy
    found = model.generate(
        PROMPT, max_new_tokens=10, do_sample=False, spec_strategy=strategy, assistant=str(folder)
    )
    assert torch.equal(found, plain(model))

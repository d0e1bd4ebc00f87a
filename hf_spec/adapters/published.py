"""Drafters that others have published: told apart by their config, read without executing anything.

More than a hundred repositories of the Hub hold heads for popular models, in a dozen layouts. The
config alone says which *family* one belongs to; sizes and counts are taken from the tensors, since
configs are often wrong about them. A family that can be used is registered by the module that
builds its head (`PublishedFamily`); the others are known by name, to be refused with a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.card import CARD_NAME
from hf_spec.adapters.hub import Place
from hf_spec.adapters.reading import PICKLES, read_json, regular_file, tensors_of
from hf_spec.common.errors import AssistantError
from hf_spec.common.files import atomic_write, write_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# Whole heads in one file, by the names under which they are published.
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")

# A whole model whose config says that its own files hold layers that draft.
MTP_INSIDE = "mtp_inside"
# Families whose drafters are ordinary models too, which may draft as such.
MODELS = ("pard",)
# Families of which nothing here can use a head, and what users can do.
UNSERVED = {
    "domino": "Domino heads",
    "dflash2": "DFlash 2 heads",
    "hydra": "Hydra heads",
}


@dataclass(frozen=True)
class PublishedFamily:
    """A family of published heads that can be used; the module that builds them registers it.

    Attributes:
        name: as `recognise` has it.
        strategy: what its heads are for where no strategy is named.
        build: makes what the strategy works with from a `PublishedHead` and the target.
    """

    name: str
    strategy: str
    build: Callable[[PublishedHead, PreTrainedModel], Any]


# Compared by identity: weights are no values.
@dataclass(frozen=True, eq=False)
class PublishedHead:
    """The files of a published drafter.

    Attributes:
        family: which one, see `recognise`.
        config: what its config.json holds.
        tensors: on the CPU, as they are stored.
        folder: where the files are.
        name: folder or Hub id as the user gave it.
        reading: what the user says of it against its config, (name, value) pairs of its family.
    """

    family: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path
    name: str
    reading: tuple[tuple[str, Any], ...] = ()

    @property
    def record(self) -> PublishedFamily:
        """What is registered of its family; an `AssistantError` if nothing here can use it."""
        return family_record(self.family, self.name)

    @property
    def strategy(self) -> str:
        """The strategy that it is for, if no other is named."""
        return self.record.strategy


_FAMILIES: dict[str, PublishedFamily] = {}


def register_family(family: PublishedFamily) -> None:
    """Make a family usable, whose name must not be taken (`ValueError`)."""
    if family.name in _FAMILIES:
        raise ValueError(f"there is a family of published heads {family.name!r} already")
    _FAMILIES[family.name] = family


def family_record(family: str, name: str) -> PublishedFamily:
    """What is registered of a family; an `AssistantError` about the head `name` otherwise."""
    if family not in _FAMILIES:
        what = UNSERVED.get(family, f"heads of the family {family!r}")
        raise AssistantError(
            f"assistant={name!r}: {what} cannot be used yet; families that can: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return _FAMILIES[family]


def recognise(config: Mapping[str, Any]) -> str | None:
    """The family of published drafters that a config.json describes; None for all else.

    That is "eagle3", "peagle", "eagle", "dflash", "dspark", "mtp", "medusa", "mlp_speculator",
    "gemma4_assistant", "pard" or one of `UNSERVED`. `MTP_INSIDE` is a whole model whose files hold
    layers that draft. A plain Llama of one layer is "eagle" here; whether it is one, or a model,
    its tensors say.
    """
    architectures = config.get("architectures")
    names = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    return _by_key(config, names) or _by_name(config, names) or _whole_model(config, names)


def published_family(name: str | os.PathLike[str]) -> str | None:
    """The family of the drafter in a folder or repository, None where it is none.

    Only the config is read, and the names of tensors where that leaves the family open.
    """
    found = _locate(name)
    return None if found is None else found[2]


def read_published(name: str | os.PathLike[str]) -> PublishedHead | None:
    """Read a published drafter from a folder, or the Hub as "org/name" or "org/name@revision".

    None where the config describes none, or a whole model (`MTP_INSIDE`).

    Raises:
        AssistantError: if it has no safetensors, or they are damaged.
        HubError: if the Hub cannot be reached, and its cache does not have the files.
    """
    found = _locate(name)
    if found is None:
        return None
    folder, config, family = found
    return PublishedHead(family, config, read_weights(folder, os.fspath(name)), folder, str(name))


def known_head(name: str | os.PathLike[str]) -> PublishedHead:
    """As `read_published`; what is no published head is an `AssistantError`, too."""
    head = read_published(name)
    if head is None:
        raise AssistantError(f"{os.fspath(name)!r} is no published head: its config describes none")
    return head


def read_weights(
    folder: Path, name: str, wanted: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """The tensors of a folder whose names are `wanted`, all by default, on the CPU as stored.

    They are in one safetensors file or in several with an index; `name` is for messages.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder, name):
        tensors.update(tensors_of(regular_file(folder, file), wanted, kinds=("BOOL",)))
    return tensors


def write_published(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str
) -> None:
    """Write a head as it would be published, with its model card; `folder` is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / WEIGHTS[0]) as part:
        # Tensors may share their memory.
        save_file(
            {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, part
        )
    with atomic_write(folder / CARD_NAME) as part:
        part.write_text(card, encoding="utf-8")
    # Without it the folder is no head: it comes last.
    write_json(folder / CONFIG, config, indent=2)


def weight_files(folder: Path, name: str) -> list[str]:
    """Names of the safetensors files of a folder; an `AssistantError` where there are none."""
    for file in WEIGHTS:
        if (folder / file).exists():
            return [file]
    if (folder / INDEX).exists():
        places = read_json(regular_file(folder, INDEX)).get("weight_map")
        files = set(places.values()) if isinstance(places, dict) else set()
        if not files or not all(isinstance(f, str) and f.endswith(".safetensors") for f in files):
            raise AssistantError(f"{folder / INDEX} does not say where the weights are")
        return sorted(files)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    why = f"{pickles[0]} is a pickle file, which is never loaded" if pickles else "none was found"
    raise AssistantError(
        f"{name!r} has no weights as safetensors ({why}); if it is published as a pickle, "
        f"`hf-spec import-head {name} OUT` writes a folder that can be read"
    )


def _locate(name: str | os.PathLike[str]) -> tuple[Path, dict[str, Any], str] | None:
    """Folder, config and family of a published drafter, its files fetched; None if it is none."""
    folder, place = Path(name), None
    if not folder.is_dir():
        place = Place.of(os.fspath(name))
        folder = place.fetch((CONFIG,))
    if not (folder / CONFIG).exists():
        return None
    config = read_json(regular_file(folder, CONFIG))
    family = recognise(config)
    if family is None or family == MTP_INSIDE:
        return None
    if place is not None:
        # The card names the licence.
        folder = place.fetch((CONFIG, CARD_NAME, INDEX, "*.safetensors"))
    if family == "eagle" and not _says_eagle(config) and not _has_fc(folder, os.fspath(name)):
        return None
    return folder, config, family


def _by_key(config: Mapping[str, Any], names: str) -> str | None:
    """What keys of their own tell."""
    kind = config.get("speculators_model_type")
    if kind:
        return str(kind)
    if "hydra_num_heads" in config or "Hydra" in names:
        return "hydra"
    if "medusa_num_heads" in config:
        return "medusa"
    model_type = str(config.get("model_type", ""))
    if model_type == "mlp_speculator" or {"n_predict", "emb_dim"} <= config.keys():
        return "mlp_speculator"
    if model_type in ("gemma4_assistant", "gemma4_unified_assistant"):
        return "gemma4_assistant"
    return None


def _by_name(config: Mapping[str, Any], names: str) -> str | None:
    """What the names of classes tell, in the order in which one name contains another."""
    block = config.get("dflash_config")
    kind = block.get("projector_type") if isinstance(block, dict) else None
    if "DSpark" in names or kind == "dspark":
        return "dspark"
    for family in ("Domino", "DFlash2"):
        if family in names:
            return family.lower()
    if "DFlash" in names or "dflash_config" in config:
        return "dflash"
    is_eagle = "eagle" in names.lower() or "draft_vocab_size" in config
    masks = {"ptd_token_id", "pard_token"} & config.keys()
    if "PEagle" in names or (is_eagle and masks):
        return "peagle"
    if "Eagle3" in names or "draft_vocab_size" in config:
        return "eagle3"
    return None


def _whole_model(config: Mapping[str, Any], names: str) -> str | None:
    """Drafters, and models with drafters inside, that look like ordinary models."""
    if config.get("pard_token") is not None or config.get("spd_type") is not None:
        return "pard"
    if _says_eagle(config) or (
        names == "LlamaForCausalLM" and config.get("num_hidden_layers") == 1
    ):
        return "eagle"
    text = config.get("text_config")
    levels = [config, text if isinstance(text, Mapping) else {}]
    counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    return MTP_INSIDE if any(level.get(key) for level in levels for key in counts) else None


def _says_eagle(config: Mapping[str, Any]) -> bool:
    return "Eagle" in str(config.get("architectures")) or config.get("model_type") == "eagle"


def _has_fc(folder: Path, name: str) -> bool:
    """Whether weights hold what joins a token with a feature, which no whole model has."""
    if not any((folder / file).exists() for file in (*WEIGHTS, INDEX)):
        # What its pickle holds nobody looks at; a whole model would be loaded as safetensors.
        return True
    return bool(read_weights(folder, name, lambda key: key == "fc.weight"))

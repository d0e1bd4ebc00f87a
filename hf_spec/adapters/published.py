"""Drafters that others have published: recognized by their config, read without executing code.

The config determines the *family*; sizes and counts are taken from the tensors, because configs are
often wrong about them. The module that builds a family's head registers a `PublishedFamily`. Other
families are recognized too, for a clear error message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.card import CARD_NAME
from hf_spec.adapters.hub import HubRepo
from hf_spec.adapters.reading import pickles_in, read_json, regular_file, tensors_of
from hf_spec.common.errors import AssistantError
from hf_spec.common.files import atomic_write, write_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# File names of whole heads.
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")

# A whole model with MTP layers in its own files.
MTP_INSIDE = "mtp_inside"
# Families whose drafters are also ordinary models.
MODELS = ("pard",)
# Families by the model types of transformers' own assistants.
ASSISTANT_TYPES = {
    "gemma4_assistant": "gemma4_assistant",
    "gemma4_unified_assistant": "gemma4_assistant",
    "muse_glimmer_assistant": "dflash",
}
# Recognized families that no strategy supports, and the name of their heads.
UNSUPPORTED = {
    "domino": "Domino heads",
    "hydra": "Hydra heads",
}


@dataclass(frozen=True)
class PublishedFamily:
    """A supported family of published heads; the module that builds them registers it.

    `name` is that of `recognize`, `strategy` the default of its heads. `build` makes the module
    that drafts.
    """

    name: str
    strategy: str
    build: Callable[[PublishedHead, PreTrainedModel], Any]


# Compared by identity: equality of tensors is not a bool.
@dataclass(frozen=True, eq=False)
class PublishedHead:
    """Files of a published drafter; `family` as in `recognize`, `config` from its config.json.

    `tensors` are on the CPU, in their stored dtypes. `name` is the folder or Hub id as the user
    passed it. `overrides` are (name, value) pairs of its family that replace config entries.
    """

    family: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path
    name: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def record(self) -> PublishedFamily:
        """Its registered family; an unsupported one raises `AssistantError`."""
        return family_record(self.family, self.name)

    @property
    def strategy(self) -> str:
        """Default strategy."""
        return self.record.strategy


_FAMILIES: dict[str, PublishedFamily] = {}


def register_family(family: PublishedFamily) -> None:
    """Register a family; a name that is taken raises `ValueError`."""
    if family.name in _FAMILIES:
        raise ValueError(f"there is a family of published heads {family.name!r} already")
    _FAMILIES[family.name] = family


def family_record(family: str, name: str) -> PublishedFamily:
    """Return a registered family; for others raise `AssistantError` about the head `name`."""
    if family not in _FAMILIES:
        what = UNSUPPORTED.get(family, f"heads of the family {family!r}")
        raise AssistantError(
            f"assistant={name!r}: {what} cannot be used yet; families that can: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return _FAMILIES[family]


def recognize(config: Mapping[str, Any]) -> str | None:
    """Return the family of published drafters that a config.json describes; None if it is none.

    Unsupported families and `MTP_INSIDE` are returned too. A plain Llama of one layer is "eagle";
    only its tensors distinguish it from a model.
    """
    architectures = config.get("architectures")
    names = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    return _by_key(config, names) or _by_name(config, names) or _whole_model(config, names)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Return how the weights are stored quantized; None if they are not."""
    for level in (config, config.get("dflash_config"), config.get("transformer_layer_config")):
        if isinstance(level, Mapping) and (entries := level.get("quantization_config")):
            entries = entries if isinstance(entries, Mapping) else {}
            return str(entries.get("quant_algo") or entries.get("quant_method") or "unknown method")
    return None


def published_family(name: str | os.PathLike[str]) -> str | None:
    """Return the family of the drafter in a folder or repository; None if it is not a drafter.

    Only the config is read, and the names of tensors if the config is ambiguous.
    """
    located = _locate(name)
    return None if located is None else located[2]


def read_published(name: str | os.PathLike[str]) -> PublishedHead | None:
    """Read a published drafter from a folder, or the Hub as "org/name" or "org/name@revision".

    Return None if the config describes no drafter, or a whole model (`MTP_INSIDE`). Raises
    `AssistantError` if it has no safetensors, or they are damaged, and `HubError` if the Hub cannot
    be reached and its cache does not have the files.
    """
    located = _locate(name)
    if located is None:
        return None
    folder, config, family = located
    return PublishedHead(family, config, read_weights(folder, os.fspath(name)), folder, str(name))


def known_head(name: str | os.PathLike[str]) -> PublishedHead:
    """Return `read_published(name)`; raise `AssistantError` if that is None."""
    head = read_published(name)
    if head is None:
        raise not_a_head(name)
    return head


def not_a_head(name: str | os.PathLike[str]) -> AssistantError:
    """Return the error about a folder or repository that is not a published head."""
    return AssistantError(f"{os.fspath(name)!r} is not a published head: its config describes none")


def read_weights(
    folder: Path, name: str, wanted: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """Return the `wanted` tensors, by default all, of a folder with one safetensors file or more.

    They are on the CPU, in their stored dtypes. `name` is used in messages.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder, name):
        tensors.update(tensors_of(regular_file(folder, file), wanted, dtypes=("BOOL",)))
    return tensors


def write_published(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str
) -> None:
    """Write a head as it would be published, with its model card; create `folder` if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / WEIGHTS[0]) as part:
        # Tensors that share memory cannot be saved.
        save_file(
            {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, part
        )
    with atomic_write(folder / CARD_NAME) as part:
        part.write_text(card, encoding="utf-8")
    # Last: without a config the folder is not a head.
    write_json(folder / CONFIG, config, indent=2)


def speculators_entries(
    algorithm: str, target: str, architectures: Sequence[str], num_tokens: int
) -> dict[str, Any]:
    """Return the config entries that all heads in the layout of speculators have."""
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
    }


def _weight_files(folder: Path, name: str) -> list[str]:
    for file in WEIGHTS:
        if (folder / file).exists():
            return [file]
    if (folder / INDEX).exists():
        weight_map = read_json(regular_file(folder, INDEX)).get("weight_map")
        files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not files or not all(isinstance(f, str) and f.endswith(".safetensors") for f in files):
            raise AssistantError(f"{folder / INDEX} has no weight_map with safetensors files")
        return sorted(files)
    pickles = pickles_in(folder)
    why = f"{pickles[0]} is a pickle file, which is never loaded" if pickles else "there is none"
    raise AssistantError(
        f"{name!r} has no weights as safetensors ({why}); if it is published as a pickle, "
        f"`hf-spec import-head {name} OUT` writes a folder that can be read"
    )


def _locate(name: str | os.PathLike[str]) -> tuple[Path, dict[str, Any], str] | None:
    """Fetch a published drafter; return folder, config and family, or None if it is none."""
    folder, repo = Path(name), None
    if not folder.is_dir():
        repo = HubRepo.of(os.fspath(name))
        folder = repo.fetch((CONFIG,))
    if not (folder / CONFIG).exists():
        return None
    config = read_json(regular_file(folder, CONFIG))
    family = recognize(config)
    if family is None or family == MTP_INSIDE:
        return None
    if repo is not None:
        # The card names the license.
        folder = repo.fetch((CONFIG, CARD_NAME, INDEX, "*.safetensors"))
    if family == "eagle" and not _says_eagle(config) and not _has_fc(folder, os.fspath(name)):
        return None
    return folder, config, family


def _by_key(config: Mapping[str, Any], names: str) -> str | None:
    """Return the family of a config with keys that only that family has."""
    if kind := config.get("speculators_model_type"):
        return str(kind)
    if "hydra_num_heads" in config or "Hydra" in names:
        return "hydra"
    model_type = str(config.get("model_type", ""))
    if "medusa_num_heads" in config or model_type == "medusa":
        return "medusa"
    if model_type == "mlp_speculator" or {"n_predict", "emb_dim"} <= config.keys():
        return "mlp_speculator"
    return ASSISTANT_TYPES.get(model_type)


def _by_name(config: Mapping[str, Any], names: str) -> str | None:
    """Return the family by class names, longer names before those that they contain."""
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
    """Return the family of drafters, or of models with MTP layers, that look like plain models."""
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
    """Return True if there is a weight that joins token and feature, which no whole model has."""
    if not any((folder / file).exists() for file in (*WEIGHTS, INDEX)):
        # Pickles are not read; a whole model would have safetensors.
        return True
    return bool(read_weights(folder, name, lambda key: key == "fc.weight"))

"""Trained draft model: the target's first layers with a LoRA merged into copies of them.

Embeddings are shared with the target. The output head is the target's, or some of its rows, after a
trained square matrix (the bridge).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import AdapterMethod, BaseModel, register_method
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.adapters.reading import VOCABULARY, check_tensors, read_vocabulary, whole_number
from hf_spec.methods.draft_model.truncated import own_copy, truncated_draft
from hf_spec.methods.feature_pairs.draft_head import DraftHead

METHOD = "draft"
LORA_PREFIX = "lora."


class TrainableDraft:
    """The target's first layers, copied, with a LoRA of some rank, for training or decoding.

    `vocabulary` are the (R,) int64 token ids that it can draft; None for all. Of `model`, the LoRA,
    the final norm and the bridge require gradients.
    """

    def __init__(
        self, target: PreTrainedModel, num_layers: int, rank: int, vocabulary: Tensor | None
    ):
        # Importing PEFT takes as long as importing the rest of this package.
        from peft import LoraConfig, LoraModel

        self.num_layers, self.rank, self.vocabulary = num_layers, rank, vocabulary
        self._base = BaseModel.of(target)
        self.model = own_copy(truncated_draft(target, num_layers))
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        self.model.requires_grad_(False)
        names = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and module not in ends
        ]
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, lora_dropout=0.0)
        self._tuner = LoraModel(self.model, config, "default")
        self.head = DraftHead(ends[1], vocabulary)
        self.model.set_output_embeddings(self.head)
        for parameter in self._norm_and_bridge().values():
            parameter.requires_grad_(True)

    def to_adapter(self, options: dict[str, Any]) -> SpecAdapter:
        """Return the trained tensors in bfloat16, with the sizes added to `options`."""
        tensors = {name: t.detach().to(torch.bfloat16) for name, t in self._trained().items()}
        if self.vocabulary is not None:
            tensors[VOCABULARY] = self.vocabulary.int()
        sizes = {"num_layers": self.num_layers, "rank": self.rank}
        return SpecAdapter(METHOD, self._base, {**sizes, **options}, tensors)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load trained weights under the names of the adapter file."""
        from peft import set_peft_model_state_dict

        weights = {name: t for name, t in tensors.items() if name != VOCABULARY}
        expected = {name: t.shape for name, t in self._trained().items()}
        check_tensors("the draft adapter", weights, expected)
        with torch.no_grad():
            for name, parameter in self._norm_and_bridge().items():
                parameter.copy_(weights.pop(name))
        lora = {name.removeprefix(LORA_PREFIX): weight for name, weight in weights.items()}
        set_peft_model_state_dict(self._tuner, lora, adapter_name="default")

    def merge(self) -> PreTrainedModel:
        """Return the draft model with the LoRA merged into its weights; it cannot be trained on."""
        self._tuner.merge_and_unload()
        return self.model.requires_grad_(False).eval()

    def _trained(self) -> dict[str, Tensor]:
        """Return everything that is trained, under the names of the adapter file."""
        from peft import get_peft_model_state_dict

        lora = get_peft_model_state_dict(self._tuner, adapter_name="default")
        return {**{LORA_PREFIX + name: t for name, t in lora.items()}, **self._norm_and_bridge()}

    def _norm_and_bridge(self) -> dict[str, nn.Parameter]:
        """Return what is trained beside the LoRA: final norm (vectors outside layers), bridge."""
        excluded = [self.model.get_input_embeddings(), self.head]
        excluded += [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        excluded_ids = {id(parameter) for module in excluded for parameter in module.parameters()}
        norm = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in excluded_ids and parameter.ndim == 1
        }
        return {**norm, "bridge": self.head.bridge.weight}


def draft_from_adapter(adapter: SpecAdapter, target: PreTrainedModel) -> PreTrainedModel:
    """Return the trained draft model of `adapter`, in the dtype and on the device of `target`."""
    what, options = "the draft adapter", adapter.options
    num_layers = whole_number(what, options, "num_layers", 1, adapter.base.num_layers - 1)
    # The rank cannot exceed the size of the largest tensor in the file.
    rank = whole_number(what, options, "rank", 1, adapter.largest)
    vocabulary = read_vocabulary(what, adapter.tensors, adapter.base.vocab_size)
    draft = TrainableDraft(target, num_layers, rank, vocabulary)
    draft.load(adapter.tensors)
    return draft.merge()


register_method(AdapterMethod(METHOD, "tree", "A draft model for {}", draft_from_adapter))

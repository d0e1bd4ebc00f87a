"""Unsupported calls raise a clear error before any forward pass and do not change the model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache, TextStreamer

from hf_spec import LookupConfig, OptionError
from hf_spec.common.compat import CACHE_NAME, output_cache
from tests.refusals import PROMPT, SMALL, refuse, small_llama
from tests.tiny_models import VOCAB, build, ragged_batch, speculation, tokenizer

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 4}, "num_beams=4.* set num_beams=1"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 selects contrastive search"),
    ({"dola_layers": "low"}, "dola_layers='low' selects DoLa"),
    ({"force_words_ids": [[5]]}, "force_words_ids=.* constrained beam search"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 .*spec_strategy='lookup'"),
    ({"assistant_early_exit": 1}, "assistant_early_exit=1 .*truncated_draft"),
    ({"use_mtp": True}, "use_mtp=True selects"),
    ({"speculation_type": "dflash"}, "speculation_type='dflash' selects"),
    ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5 .*changes the output"),
    ({"token_healing": True}, "token_healing=True selects"),
    ({"prefill_chunk_size": 8}, "prefill_chunk_size=8 selects"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"use_cache": False}, "use_cache=False"),
    ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
    ({"output_attentions": True}, "output_attentions=True"),
    ({"output_hidden_states": True}, "output_hidden_states=True"),
]


class TestSettings:
    @pytest.mark.parametrize(("settings", "match"), SETTINGS, ids=[str(s) for s, _ in SETTINGS])
    def test_in_the_call(self, settings: dict[str, Any], match: str) -> None:
        refuse(match, **settings)

    @pytest.mark.parametrize("where", ["generation_config", "model.generation_config"])
    @pytest.mark.parametrize("name", ["use_cache", "cache_implementation", "num_beams"])
    def test_in_a_config(self, name: str, where: str) -> None:
        value = {"use_cache": False, "cache_implementation": "paged", "num_beams": 2}[name]
        model = small_llama()
        given = {}
        if where == "generation_config":
            given["generation_config"] = GenerationConfig(**{name: value})
        else:
            setattr(model.generation_config, name, value)
        refuse(f"{name}={value!r}", model=model, **given)

    @pytest.mark.parametrize("value", [None, "dynamic", "hybrid", "static"])
    def test_names_of_the_usual_cache_are_served(self, value: str | None) -> None:
        call = {"input_ids": PROMPT, "max_new_tokens": 6, "cache_implementation": value}
        model = build("llama")
        assert torch.equal(model.generate(**call, spec_strategy="lookup"), model.generate(**call))

    def test_a_static_cache_is_the_storage_that_there_is_anyway(self) -> None:
        """No static cache is created, even if a config selects it; a `DynamicCache` is returned."""
        model = small_llama()
        config = GenerationConfig(cache_implementation="static", return_dict_in_generate=True)
        call = {"max_new_tokens": 6, "spec_strategy": "lookup"}
        output = model.generate(PROMPT, generation_config=config, **call)
        assert type(output_cache(output)) is T.DynamicCache
        plain = model.generate(PROMPT, max_new_tokens=6)
        assert torch.equal(output.sequences, plain)
        batch = model.generate_batch(PROMPT.tolist(), generation_config=config, **call)
        assert batch["req_0"].generated_tokens == plain[0, PROMPT.shape[1] :].tolist()

    def test_a_call_can_unset_what_a_config_asks_for(self) -> None:
        model = small_llama()
        model.generation_config.penalty_alpha = 0.6
        model.generate(PROMPT, max_new_tokens=4, spec_strategy="lookup", penalty_alpha=None)

    @pytest.mark.parametrize(
        ("argument", "match"),
        [
            ("assistant_model", "pass the draft model as assistant="),
            ("custom_generate", "replaces the decoding loop"),
            ("negative_prompt_ids", "classifier-free guidance"),
            ("synced_gpus", "FSDP"),
            ("inputs_embeds", "pass the prompt as input_ids"),
        ],
    )
    def test_arguments_of_other_methods(self, argument: str, match: str) -> None:
        value = {
            "assistant_model": build("llama"),
            "custom_generate": lambda model, input_ids, **_: input_ids,
            "synced_gpus": True,
            "inputs_embeds": torch.zeros(1, 3, 32),
        }.get(argument, PROMPT)
        refuse(f"{argument}= cannot be combined with spec_strategy.*{match}", **{argument: value})

    def test_synced_gpus_switched_off_is_served(self) -> None:
        build("llama").generate(PROMPT, max_new_tokens=2, spec_strategy="lookup", synced_gpus=False)


class TestStrategies:
    @pytest.mark.parametrize("value", ["meduza", "", 3, False, ["lookup"], {"strategy": None}])
    def test_unknown(self, value: Any) -> None:
        refuse("unknown spec_strategy .*; known: .*lookup", error=OptionError, spec_strategy=value)

    def test_a_class_instead_of_an_object(self) -> None:
        match = r"spec_strategy=LookupConfig is a class; pass an instance: LookupConfig\(\)"
        refuse(match, error=OptionError, spec_strategy=LookupConfig)

    @pytest.mark.parametrize("value", [{}, {"name": "lookup"}, {"Strategy": "lookup"}])
    def test_a_dictionary_that_names_no_strategy(self, value: dict[str, str]) -> None:
        match = "has no key 'strategy' with the name; known: auto, .*lookup"
        refuse(match, error=OptionError, spec_strategy=value)

    def test_unknown_option(self) -> None:
        refuse(
            "LookupConfig has no option length; did you mean 'copy_length'. known: .*match_length",
            error=OptionError,
            spec_strategy={"strategy": "lookup", "length": 3},
        )

    @pytest.mark.parametrize(
        ("strategy", "meant"),
        [
            ("lokup", "lookup"),
            ("Falcon", "falcon"),
            ({"strategy": "drafft"}, "draft"),
            ({"strategy": "draft", "length_policy": "heuristics"}, "heuristic"),
            ({"strategy": "lookup", "batching": "unpaded"}, "unpadded"),
            ({"strategy": "falcon", "tree": "falcon-vicunna"}, "falcon-vicuna"),
            ({"strategy": "sdsat", "tree": "sdsat5"}, "sdsat-5"),
            ({"strategy": "gsd", "merge_lenght": 2}, "merge_length"),
        ],
    )
    def test_a_slip_of_the_pen(self, strategy: Any, meant: str) -> None:
        refuse(f"did you mean '{meant}'.*known: .*", error=OptionError, spec_strategy=strategy)

    @pytest.mark.parametrize(
        ("strategy", "option", "value"),
        [
            ("lookup", "match_length", 0),
            ("lookup", "match_length", 10**9),
            ("lookup", "copy_length", 2.5),
            ("lookup", "max_matches", True),
            ("lookup", "min_match_length", 9),
            ("draft", "max_draft_tokens", -1),
            ("draft", "max_draft_tokens", "5"),
            ("draft", "confidence_threshold", 1.5),
            ("draft", "confidence_threshold", float("nan")),
            ("draft", "length_policy", "oracle-like"),
            ("draft", "length_policy", ["static"]),
            ("draft", "sample_drafts", 1),
            ("tree", "children", None),
            ("tree", "min_probability", -0.1),
        ],
    )
    def test_bad_values_are_named(self, strategy: str, option: str, value: Any) -> None:
        refuse(
            option,
            error=OptionError,
            spec_strategy={"strategy": strategy, option: value},
            assistant=None if strategy == "lookup" else build("llama"),
        )

    def test_assistant_without_a_strategy(self) -> None:
        refuse(
            "without spec_strategy=",
            error=OptionError,
            spec_strategy=None,
            assistant=build("llama"),
        )


class TestPrompts:
    @pytest.mark.parametrize(
        ("ids", "match"),
        [
            (PROMPT[0], r"input_ids of shape \(21,\)"),
            (PROMPT[:, :0], r"at least one token in every row"),
            (PROMPT[:0], "at least one token in every row"),
            (PROMPT.float(), "torch.float32"),
            (PROMPT[None], r"shape \(1, 1, 21\)"),
            (PROMPT.tolist(), "input_ids of type list: .*tensor of token ids"),
            (PROMPT + VOCAB, "the model's vocabulary is 0 to 96"),
            (PROMPT - 50, "input_ids have values from -"),
        ],
    )
    def test_ids(self, ids: Any, match: str) -> None:
        refuse(match, input_ids=ids)
        if not isinstance(ids, list):
            refuse(match.replace("input_ids of", "inputs of"), inputs=ids)

    def test_padding_on_the_right(self) -> None:
        batch = ragged_batch()
        flipped = {name: tensor.flip(1) for name, tensor in batch.items()}
        refuse(r"rows \[1, 2, 3, 4\] end in padding.*padding_side = 'left'", **flipped)
        # Without a mask, `generate()` finds the padding from `pad_token_id`.
        refuse("end in padding", input_ids=flipped["input_ids"], pad_token_id=0)

    def test_a_row_of_padding_alone(self) -> None:
        batch = ragged_batch()
        batch["attention_mask"][2] = 0
        refuse(r"rows \[2\] end in padding .* or are all padding", **batch)

    @pytest.mark.parametrize(
        ("mask", "match"),
        [
            (torch.ones(21, dtype=torch.long), "attention_mask .* does not match"),
            (torch.ones(1, 20, dtype=torch.long), "attention_mask .* does not match"),
            (torch.ones(1, 1, 21, 21), "attention_mask .* does not match"),
            ([[1] * 21], "attention_mask .* does not match"),
            (torch.full((1, 21), 2), "values other than 0 and 1"),
            (torch.full((1, 21), 0.5), "values other than 0 and 1"),
        ],
    )
    def test_masks(self, mask: Any, match: str) -> None:
        refuse(match, attention_mask=mask)

    @pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
    def test_padding_between_tokens(self, name: str) -> None:
        mask = torch.ones_like(PROMPT)
        mask[0, 4:6] = 0
        call = {"input_ids": PROMPT, "attention_mask": mask, "max_new_tokens": 9}
        if name == "mistral_sliding":
            refuse(r"rows \[0\] have padding between", model=build(name), **call)
        else:
            plain = build(name).generate(**call)
            assert torch.equal(build(name).generate(**call, spec_strategy="lookup"), plain)

    def test_positions(self) -> None:
        usual = torch.arange(21)[None]
        refuse("position_ids other than 0, 1, 2", position_ids=usual + 3)
        refuse(r"position_ids \(\(1, 5\)\) does not match", position_ids=usual[:, :5])
        refuse(r"position_ids \(list\) does not match", position_ids=usual.tolist())
        call = {"input_ids": PROMPT, "position_ids": usual, "max_new_tokens": 6}
        model = build("llama")
        assert torch.equal(model.generate(**call, spec_strategy="lookup"), model.generate(**call))

    @pytest.mark.parametrize("value", [0, 1])
    @pytest.mark.parametrize("name", ["gpt2", "gptj", "codegen", "gpt_bigcode_mqa"])
    def test_token_types_that_are_looked_up_among_the_tokens(self, name: str, value: int) -> None:
        types = torch.full_like(PROMPT, value)
        model = build(name)
        changed = model(PROMPT, token_type_ids=types).logits - model(PROMPT).logits
        assert changed.abs().max() > 0.01, "otherwise it could be served"
        match = rf"token_type_ids \(values {value}\): .*return_token_type_ids=False"
        refuse(match, model=model, token_type_ids=types)

    @pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
    def test_token_types_of_a_table_of_their_own(self, kind: str) -> None:
        config = T.AutoConfig.for_model(
            kind, **{**SMALL, "bos_token_id": 1}, is_decoder=True, initializer_range=0.3
        )
        torch.manual_seed(0)
        model = T.AutoModelForCausalLM.from_config(config).eval()
        call = {"input_ids": PROMPT, "max_new_tokens": 12, "do_sample": False}
        call["token_type_ids"] = torch.zeros_like(PROMPT)
        assert torch.equal(model.generate(**call, spec_strategy="lookup"), model.generate(**call))
        call["token_type_ids"] = (PROMPT > 20).long()
        refuse(r"token_type_ids \(values 0, 1\)", model=model, **call)

    def test_token_types_that_generate_takes_away(self) -> None:
        size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "dff": 16}
        torch.manual_seed(0)
        model = T.CTRLLMHeadModel(T.CTRLConfig(vocab_size=VOCAB, **size)).eval()
        call = {"input_ids": PROMPT, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        call["token_type_ids"] = torch.full_like(PROMPT, 7)
        plain = model.generate(**call)
        assert torch.equal(model.generate(**call, spec_strategy="lookup"), plain)

    def test_lengths_that_are_no_whole_numbers(self) -> None:
        refuse("max_new_tokens=2.5: .* must be whole numbers", max_new_tokens=2.5)
        refuse("max_length=30.0: .* whole numbers", max_length=30.0, max_new_tokens=None)
        config = GenerationConfig(max_length=30.5)
        refuse("max_length=30.5", generation_config=config, max_new_tokens=None)
        criteria = [T.MaxLengthCriteria(30.5)]
        refuse("MaxLengthCriteria.max_length=30.5", stopping_criteria=criteria)

    @pytest.mark.parametrize(
        "length",
        [
            {"max_new_tokens": np.int64(9)},
            {"max_new_tokens": torch.tensor(9)},
            {"max_length": torch.tensor(30)},
            {"max_length": np.int32(30)},
        ],
        ids=str,
    )
    def test_lengths_of_other_integer_types(self, length: dict[str, Any]) -> None:
        model, call = build("llama"), {"do_sample": False, **length}
        plain = model.generate(PROMPT, **call)
        assert plain.shape[1] == 30
        assert torch.equal(model.generate(PROMPT, **call, spec_strategy="lookup"), plain)
        batch = model.generate_batch(PROMPT.tolist(), **call, spec_strategy="lookup")
        assert batch["req_0"].generated_tokens == plain[0, PROMPT.shape[1] :].tolist()

    @pytest.mark.parametrize(
        "length", [{"max_length": int(1e30)}, {"max_new_tokens": 10**11}], ids=str
    )
    @pytest.mark.parametrize("strategy", ["lookup", "draft", "falcon", "auto"])
    def test_lengths_that_no_call_reaches(self, length: dict[str, Any], strategy: str) -> None:
        """1e30 is the `model_max_length` of tokenizers without a limit."""
        model = build("llama")
        plain = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
        end = plain[0, PROMPT.shape[1] + 9].item()
        call = {"do_sample": False, "eos_token_id": end, **length, **speculation("llama", strategy)}
        expected = model.generate(PROMPT, max_new_tokens=20, do_sample=False, eos_token_id=end)
        assert expected.shape[1] < 50
        assert torch.equal(model.generate(PROMPT, **call), expected)
        batch = model.generate_batch(PROMPT.tolist(), **call)
        new_tokens = expected[0, PROMPT.shape[1] :].tolist()
        assert batch["req_0"].generated_tokens == new_tokens

    def test_a_generation_config_of_another_type(self) -> None:
        refuse("generation_config of type dict", error=OptionError, generation_config={"top_k": 1})


class TestCaches:
    def filled(self, ids: Tensor, model: T.PreTrainedModel) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(ids, **{CACHE_NAME: cache}, use_cache=True)
        return cache

    @pytest.mark.parametrize(
        "cache",
        [
            StaticCache(config=T.LlamaConfig(**SMALL), max_cache_len=40),
            ((torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)),),
            "static",
        ],
    )
    def test_of_another_kind(self, cache: Any) -> None:
        refuse("pass a DynamicCache", **{CACHE_NAME: cache})

    def test_that_hold_the_whole_prompt(self) -> None:
        model = build("llama")
        refuse("holds 21 tokens and input_ids 21", **{CACHE_NAME: self.filled(PROMPT, model)})

    def test_of_another_batch(self) -> None:
        cache = self.filled(PROMPT[:, :5], build("llama"))
        refuse(
            "has 1 rows .* but the call has 2 rows",
            **{CACHE_NAME: cache},
            input_ids=PROMPT.repeat(2, 1),
        )

    def test_of_another_model(self) -> None:
        cache = self.filled(PROMPT[:, :5], small_llama())
        refuse("of 2 layers, .* the model 3 layers", **{CACHE_NAME: cache})


class TestStreamers:
    def test_several_sequences(self) -> None:
        class Collect:
            def put(self, value: Tensor) -> None:
                pass

            def end(self) -> None:
                pass

        refuse("Collect follows one sequence", streamer=Collect(), **ragged_batch())

    @pytest.mark.parametrize(
        "call", [ragged_batch(), {"num_return_sequences": 2, "do_sample": True}]
    )
    def test_the_prompts_of_several_sequences_are_not_streamed(self, call: dict[str, Any]) -> None:
        """The error names an alternative, which the error of `TextStreamer` does not."""
        streamer = TextStreamer(tokenizer())
        refuse(r"TextStreamer follows one sequence.*BatchTextStreamer", streamer=streamer, **call)

    def test_without_its_methods(self) -> None:
        refuse(r"has no put\(\) and end\(\)", error=OptionError, streamer="stdout")


class TestServedAfterAll:
    """Unusual calls behave as in plain `generate()`."""

    def test_no_prompt_starts_from_the_bos_token(self) -> None:
        model = build("llama")
        call = {"max_new_tokens": 8, "bos_token_id": 1}
        assert torch.equal(model.generate(**call, spec_strategy="lookup"), model.generate(**call))

    def test_no_prompt_and_no_bos_token(self) -> None:
        model = small_llama()
        with pytest.raises(ValueError, match="bos_token_id"):
            model.generate(max_new_tokens=8)
        with pytest.raises(ValueError, match="bos_token_id"):
            model.generate(max_new_tokens=8, spec_strategy="lookup")

    def test_positional_inputs_and_int32(self) -> None:
        model = build("llama")
        plain = model.generate(PROMPT.int(), max_new_tokens=8)
        drafted = model.generate(PROMPT.int(), max_new_tokens=8, spec_strategy="lookup")
        assert torch.equal(drafted, plain)
        assert drafted.dtype == plain.dtype

    @pytest.mark.parametrize("settings", [{"max_length": 21}, {"max_length": 5}])
    def test_no_room_is_the_error_of_plain_generate(self, settings: dict[str, Any]) -> None:
        for strategy in (None, "lookup"):
            with pytest.raises(ValueError, match="`max_length` is set to"):
                build("llama").generate(PROMPT, spec_strategy=strategy, **settings)

    def test_bfloat16(self) -> None:
        model = copy.deepcopy(build("llama")).bfloat16()
        call = {"input_ids": PROMPT, "max_new_tokens": 12, "return_dict_in_generate": True}
        call |= {"output_scores": True}
        plain = model.generate(**call)
        drafted = model.generate(**call, spec_strategy="lookup")
        assert drafted.scores[0].dtype == plain.scores[0].dtype == torch.float32
        # Rounding may decide between two tokens with adjacent bfloat16 logits.
        new = slice(PROMPT.shape[1], None)
        pairs = list(zip(plain.sequences[0, new], drafted.sequences[0, new], strict=True))
        same = next((step for step, (one, other) in enumerate(pairs) if one != other), len(pairs))
        assert same >= 4
        if same < len(pairs):
            chosen = plain.scores[same][0, torch.stack(pairs[same])]
            assert chosen[0] - chosen[1] <= torch.finfo(torch.bfloat16).eps * chosen[0]

    def test_the_target_as_its_own_draft_model(self) -> None:
        model = build("llama")
        plain = model.generate(PROMPT, max_new_tokens=13)
        drafted = model.generate(
            PROMPT,
            max_new_tokens=13,
            spec_strategy={"strategy": "draft", "max_draft_tokens": 5},
            assistant=model,
            return_dict_in_generate=True,
        )
        assert torch.equal(drafted.sequences, plain)
        # Thirteen tokens in rounds of five draft tokens and a bonus token.
        assert drafted.spec_stats.target_forwards == 3

"""Kernels, compiled layers and packed weights."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "of equal logits the last one is taken",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/verify_tree/kernel.py",
        old="first = tl.min(tl.where(logits == top, index, SENTINEL), axis=0)",
        new="first = tl.max(tl.where(logits == top, index, -1), axis=0)",
        tests=("tests/kernels/test_verify_tree.py::test_the_first_of_equals_is_taken",),
    ),
    Mutant(
        "a draw in a later chunk does not subtract the weight before it",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/verify_tree/kernel.py",
        old="_first_beyond(_weights(logits, top), goal - before, index, SENTINEL)",
        new="_first_beyond(_weights(logits, top), goal, index, SENTINEL)",
        tests=("tests/kernels/test_verify_tree.py::test_draws_from_several_chunks",),
    ),
    Mutant(
        "keys are written to the place of their slot's number",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/kv_write/kernel.py",
        old="tl.load(place_ptr + num_tokens + token, mask=inside, other=0)",
        new="tl.load(place_ptr + token, mask=inside, other=0)",
        tests=("tests/kernels/test_kv_write.py::test_the_kernel",),
    ),
    Mutant(
        "accepted keys move in the first head only",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/kv_keep/kernel.py",
        old="base += tl.program_id(1).to(tl.int64) * stride_h",
        new="base += tl.program_id(1).to(tl.int64) * 0",
        tests=("tests/kernels/test_kv_keep.py::test_the_kernel",),
    ),
    Mutant(
        "the gradient of the soft loss forgets the temperature",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/distill_loss/kernel.py",
        old="grad *= soft * inverse_temperature",
        new="grad *= soft",
        tests=("tests/kernels/test_distill_loss.py::test_the_kernel",),
    ),
    Mutant(
        "the entropy of a distribution with zeros is NaN",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/draft_features/kernel.py",
        old="tl.log(tl.where(probs > 0.0, probs, 1.0))",
        new="tl.log(probs)",
        tests=("tests/kernels/test_draft_features.py",),
    ),
    Mutant(
        "a chunk of attention ends one position early",
        area="Triton kernels",
        file="kernels/hf_spec_kernels/ragged_tree_attention/kernel.py",
        old="reach = position % window + 1",
        new="reach = position % window",
        tests=("tests/kernels/test_ragged_tree_attention.py::test_the_kernel_agrees",),
    ),
    Mutant(
        "a sliding window shows one key too many",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/ragged_tree_attention/kernel.cpp",
        old="return position - call.scoring.window + 1;",
        new="return position - call.scoring.window;",
        tests=("tests/kernels/test_ragged_tree_attention_cpu.py::test_it_agrees",),
    ),
    Mutant(
        "weights are not scaled down where a sink is the largest score",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/ragged_tree_attention/kernel.cpp",
        old="whole = whole * factor + std::exp(sink - peak);",
        new="whole = whole + std::exp(sink - peak);",
        tests=("tests/kernels/test_ragged_tree_attention_cpu.py::test_it_agrees",),
    ),
    Mutant(
        "a draft that spans two blocks of keys shows the wrong ones",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/ragged_tree_attention/kernel.cpp",
        old="const int64_t bit = begin + i - prefix;",
        new="const int64_t bit = i - known;",
        tests=("tests/kernels/test_ragged_tree_attention_cpu.py",),
    ),
    Mutant(
        "every block of outputs gets the bias of the first",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/packed_linear/kernel.cpp",
        old="added[i] = widened(bias[output + i]);",
        new="added[i] = widened(bias[i]);",
        tests=("tests/kernels/test_packed_linear.py::test_results_are_those_of_linear",),
    ),
    Mutant(
        "bfloat16 rounds ties away from zero",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/vectors.h",
        old="(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16",
        new="(bits + 0x8000u) >> 16",
        tests=(
            "tests/kernels/test_packed_linear.py"
            "::test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even",
        ),
    ),
    Mutant(
        "SiLU is the sigmoid",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/decoder_layer/layer.h",
        old="inline float silu_of(float x) { return x / (1.0f + exp_of(-x)); }",
        new="inline float silu_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }",
        tests=("tests/kernels/test_decoder_layer.py::test_functions",),
    ),
    Mutant(
        "a library that was cut off is loaded",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/build.py",
        old="if hashlib.sha256(path.read_bytes()).hexdigest() == digest.read_text():",
        new="if digest.read_text():",
        tests=("tests/kernels/test_build.py",),
    ),
    Mutant(
        "bfloat16 values are not rounded between operations",
        area="compiled layers",
        file="hf_spec/backend/cpu/layer_text.py",
        old='code = self.code if exact else f"rounded({self.code})"',
        new="code = self.code",
        tests=(
            "tests/backend/cpu/test_layer_source.py"
            "::test_bfloat16_is_rounded_after_every_operation",
        ),
    ),
    Mutant(
        "layers with other constants share a compiled layer",
        area="compiled layers",
        file="hf_spec/engine/fast/layer_state.py",
        old="return type(value), repr(value) if isinstance(value, (float, complex)) else value",
        new="return type(value), None",
        tests=(
            "tests/engine/fast/test_layer_state.py::test_a_change_of_the_result_changes_the_key",
        ),
    ),
    Mutant(
        "replaced weights are not noticed",
        area="compiled layers",
        file="hf_spec/engine/fast/layer_state.py",
        old="if [*map(Tensor.data_ptr, self._tensors)] != self._addresses:",
        new="if len(self._tensors) != len(self._addresses):",
        tests=(
            "tests/engine/fast/test_layer_state.py::test_a_change_is_seen",
            "tests/engine/fast/test_compiled_layers.py::test_new_weights_are_used",
        ),
    ),
    Mutant(
        "a compiled layer that computes something else is used",
        area="compiled layers",
        file="hf_spec/engine/fast/compiled_layers.py",
        old="elif not _agree(result, expected):",
        new="elif type(result) is not type(expected):",
        tests=(
            "tests/engine/fast/test_compiled_layers.py"
            "::test_a_program_that_computes_something_else_is_not_used",
        ),
    ),
    Mutant(
        "hooks of users inside a layer are skipped",
        area="compiled layers",
        file="hf_spec/engine/fast/compiled_layers.py",
        old='harmless = module is layer or packages <= {"transformers", "hf_spec"}',
        new="harmless = True",
        tests=("tests/engine/fast/test_compiled_layers.py::test_hooks_and_training_are_obstacles",),
    ),
    Mutant(
        "a call under autocast runs compiled",
        area="compiled layers",
        file="hf_spec/engine/fast/compiled_layers.py",
        old='other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")',
        new="other = torch.is_grad_enabled()",
        tests=(
            "tests/engine/fast/test_compiled_layers.py"
            "::test_autocast_that_begins_inside_the_model_is_left_alone",
        ),
    ),
    Mutant(
        "weights that change in place are not packed again",
        area="packed weights",
        file="hf_spec/engine/fast/packed_linear.py",
        old="if not all(map(is_, weights, self._weights)) or _versions(weights) != self._seen:",
        new="if not all(map(is_, weights, self._weights)):",
        tests=("tests/engine/fast/test_packed_linear.py",),
    ),
    Mutant(
        "the target reads the rounded weights of a draft model",
        area="packed weights",
        file="hf_spec/engine/fast/packed_linear.py",
        old="forms.rounded if mode.rounded else None",
        new="forms.rounded",
        tests=("tests/engine/fast/test_packed_linear.py",),
    ),
    Mutant(
        "the transposed product leaves out the bias",
        area="packed weights",
        file="hf_spec/engine/fast/packed_linear.py",
        old="if bias is not None:\n            output += bias",
        new="if bias is None:\n            output = output.clone()",
        tests=("tests/engine/fast/test_packed_linear.py::test_values_are_those_of_linear",),
    ),
)

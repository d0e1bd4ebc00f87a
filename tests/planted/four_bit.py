"""4-bit linear layers: C++ kernels and their callers."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "a draft runs in the forward pass of a prompt of 8-bit layers",
        area="packed weights",
        file="hf_spec/generation/one_call.py",
        old="prefills = prefills or own_prefill.shares_outliers(model)",
        new="prefills = prefills or False",
        tests=("tests/targets/test_quantized.py::test_a_draft_changes_no_outliers_of_a_prompt",),
    ),
    Mutant(
        "4-bit layers inside compiled layers leave out the bias",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/kernel.cpp",
        old="    if (!bias) return;\n",
        new="    return;\n",
        tests=("tests/targets/test_quantized.py::test_compiled_layers_compute_the_same_bits",),
    ),
    Mutant(
        "4-bit layers inside compiled layers have scales of larger blocks",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/__init__.py",
        old="block = 2 * self.codes.shape[1] // len(self.scales)",
        new="block = 4 * self.codes.shape[1] // len(self.scales)",
        tests=("tests/targets/test_quantized.py::test_compiled_layers_compute_the_same_bits",),
    ),
    Mutant(
        "a block of 4-bit codes has the scales of the next",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/kernel.cpp",
        old="part[b][r][v], scale + v * HALF);",
        new="part[b][r][v], scale + (begin + BLOCKS * block < steps) * outputs + v * HALF);",
        tests=(
            "tests/kernels/test_four_bit_linear.py::test_results_are_exact_up_to_rounding",
            "tests/backend/cpu/test_four_bit.py::test_the_bits_are_those_of_bitsandbytes",
        ),
    ),
    Mutant(
        "the two 4-bit codes of a byte are exchanged",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/kernel.cpp",
        old="pairs[0].first[i] = values[first & 15];",
        new="pairs[0].first[i] = values[first >> 4];",
        tests=("tests/kernels/test_four_bit_linear.py::test_portable_code_computes_the_same",),
    ),
    Mutant(
        "the two 4-bit codes of a byte are exchanged, with AVX-512",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/kernel.cpp",
        old="_mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), values);",
        new="_mm512_permutexvar_epi16(low, values);",
        tests=("tests/kernels/test_four_bit_linear.py::test_results_are_exact_up_to_rounding",),
    ),
    Mutant(
        "the larger groups of rows lose their last row",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/row_groups.h",
        old="int64_t size(int64_t group) const { return each + (group < larger); }",
        new="int64_t size(int64_t) const { return each; }",
        tests=(
            "tests/kernels/test_four_bit_linear.py::test_results_are_exact_up_to_rounding",
            "tests/kernels/test_packed_linear.py::test_results_are_those_of_linear",
        ),
    ),
    Mutant(
        "a block of row-major 4-bit codes has the scale of the next",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="scales[(output + o) * blocks + index]",
        new="scales[(output + o) * blocks + (index + 1) % blocks]",
        tests=(
            "tests/kernels/test_four_bit_row_major.py"
            "::test_dequantized_weights_are_those_of_the_reference",
        ),
    ),
    Mutant(
        "both 4-bit codes of a row-major byte are its low half, with AVX-512",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), (__m512)parts[0])",
        new="_mm512_permutexvar_ps(wide, (__m512)parts[0])",
        tests=("tests/kernels/test_four_bit_row_major.py::test_other_processors_compute_the_same",),
    ),
    Mutant(
        "the fourth bit of a 4-bit code is that of the other code, with AVX2",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="_mm256_srli_epi32(wide, 4), _mm256_slli_epi32(wide, 24)",
        new="_mm256_srli_epi32(wide, 4), _mm256_slli_epi32(wide, 28)",
        tests=("tests/kernels/test_four_bit_row_major.py::test_other_processors_compute_the_same",),
    ),
    Mutant(
        "the two 4-bit codes of a row-major byte are exchanged, in portable code",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="weights[0][lane] = values[codes[lane] >> 4];",
        new="weights[0][lane] = values[codes[lane] & 15];",
        tests=("tests/kernels/test_four_bit_row_major.py::test_other_processors_compute_the_same",),
    ),
    Mutant(
        "the last of an odd number of 4-bit outputs is left out",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/row_groups.h",
        old="run_tile<SHARED, 1, MOST>(product, row, output, count);",
        new=";",
        tests=("tests/kernels/test_four_bit_row_major.py::test_results_are_exact_up_to_rounding",),
    ),
    Mutant(
        "a group of rows reads the first group's 4-bit states",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="const float* mine = states + row * inputs;",
        new="const float* mine = states;",
        tests=("tests/kernels/test_four_bit_row_major.py::test_results_are_exact_up_to_rounding",),
    ),
    Mutant(
        "double quantization's offset is ignored in 4-bit layers",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="return product + *offset;",
        new="return product;",
        tests=(
            "tests/kernels/test_four_bit_row_major.py"
            "::test_dequantized_weights_are_those_of_the_reference",
        ),
    ),
    Mutant(
        "all 4-bit scales share the first scale of double quantization",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="values[index / BLOCK];",
        new="values[0];",
        tests=(
            "tests/kernels/test_four_bit_row_major.py"
            "::test_dequantized_weights_are_those_of_the_reference",
        ),
    ),
    Mutant(
        "4-bit scales are rounded once after the offset",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="const volatile float product",
        new="const float product",
        tests=(
            "tests/kernels/test_four_bit_row_major.py"
            "::test_dequantized_weights_are_those_of_the_reference",
        ),
    ),
    Mutant(
        "dequantized 4-bit weights are not rounded to bfloat16",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/four_bit_linear/row_major.cpp",
        old="return value == value ? reinterpret_cast<Floats>(rounded) : value;",
        new="return value;",
        tests=(
            "tests/kernels/test_four_bit_row_major.py"
            "::test_dequantized_weights_are_those_of_the_reference",
        ),
    ),
    Mutant(
        "a 4-bit weight is read before bitsandbytes rearranged it",
        area="packed weights",
        file="hf_spec/backend/cpu/four_bit.py",
        old="elif not layer.support_avx512bf16_for_cpu and",
        new="elif",
        tests=(
            "tests/backend/cpu/test_four_bit.py"
            "::test_a_weight_is_left_to_bitsandbytes_until_it_is_rearranged",
        ),
    ),
    Mutant(
        "4-bit layers do not round states to the compute dtype",
        area="packed weights",
        file="hf_spec/backend/cpu/four_bit.py",
        old="rounded = states.to(compute)",
        new="rounded = states",
        tests=("tests/backend/cpu/test_four_bit.py::test_the_bits_are_those_of_bitsandbytes",),
    ),
    Mutant(
        "4-bit layers leave out the bias",
        area="packed weights",
        file="hf_spec/backend/cpu/four_bit.py",
        old="results += layer.bias.to(compute)",
        new="results = results.clone()",
        tests=("tests/backend/cpu/test_four_bit.py::test_the_bits_are_those_of_bitsandbytes",),
    ),
    Mutant(
        "double quantization of 4-bit layers is ignored",
        area="packed weights",
        file="hf_spec/backend/cpu/four_bit.py",
        old="NestedScales(scales, outer.code, outer.absmax, quantization.offset)",
        new="outer.code[scales.long()]",
        tests=(
            "tests/backend/cpu/test_four_bit.py::test_row_major_weights_are_those_of_bitsandbytes",
        ),
    ),
    Mutant(
        "4-bit weights are copied in every call",
        area="packed weights",
        file="hf_spec/backend/cpu/four_bit.py",
        old="codes.view(-1, num_inputs // 2),",
        new="codes.view(-1, num_inputs // 2).clone(),",
        tests=("tests/backend/cpu/test_four_bit.py::test_the_weight_is_read_in_place",),
    ),
    Mutant(
        "4-bit layers of other packages are replaced",
        area="packed weights",
        file="hf_spec/backend/cpu/four_bit.py",
        old="if type(module).__module__ != MODULE or type(module).__name__ not in CLASSES:",
        new="if type(module).__name__ not in CLASSES:",
        tests=("tests/backend/cpu/test_four_bit.py::test_layers_of_other_classes_are_not_ours",),
    ),
    Mutant(
        "4-bit layers lose their gradients",
        area="packed weights",
        file="hf_spec/engine/fast/packed_linear.py",
        old="fast = mode.fast and not _is_left_alone()",
        new="fast = mode.fast",
        tests=(
            "tests/backend/cpu/test_four_bit.py"
            "::test_calls_with_gradients_are_left_to_bitsandbytes",
        ),
    ),
    Mutant(
        "an 8-bit output has the scale of its neighbor",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/eight_bit_linear/kernel.cpp",
        old="narrow(rounded_to<T>(sum) * rounded_to<T>(scales[output]), results",
        new="narrow(rounded_to<T>(sum) * rounded_to<T>(scales[output ^ 1]), results",
        tests=(
            "tests/kernels/test_eight_bit_linear.py::test_weight_only_results_are_exact_up_to_rounding",
        ),
    ),
    Mutant(
        "outliers are quantized as well",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/eight_bit_linear/kernel.cpp",
        old="for (const Outlier& outlier : outliers) to[outlier.input] = 0;",
        new="",
        tests=("tests/kernels/test_eight_bit_linear.py",),
    ),
    Mutant(
        "prompts of 8-bit models run row by row",
        area="packed weights",
        file="hf_spec/backend/cpu/eight_bit.py",
        old="if prompt or not _is_ready(layer, states.dtype):",
        new="if not _is_ready(layer, states.dtype):",
        tests=("tests/backend/cpu/test_eight_bit.py",),
    ),
    Mutant(
        "8-bit layers inside compiled layers leave out the bias",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/eight_bit_linear/kernel.cpp",
        old="static_cast<const bfloat16*>(bias),",
        new="nullptr,",
        tests=("tests/targets/test_quantized.py::test_compiled_layers_compute_the_same_bits",),
    ),
    Mutant(
        "replaced scales of 8-bit layers are not noticed by compiled layers",
        area="compiled layers",
        file="hf_spec/engine/fast/layer_state.py",
        old='"state.CB", "state.SCB", ',
        new='"state.CB", ',
        tests=("tests/engine/fast/test_layer_state.py::test_changes_of_8_bit_layers_are_seen",),
    ),
    Mutant(
        "replaced scales of 4-bit layers are not noticed by compiled layers",
        area="compiled layers",
        file="hf_spec/engine/fast/layer_state.py",
        old='FOUR_BIT_STATE = {"absmax", ',
        new="FOUR_BIT_STATE = {",
        tests=("tests/engine/fast/test_layer_state.py::test_changes_of_4_bit_layers_are_seen",),
    ),
    Mutant(
        "subnormal float16 states of 8-bit layers keep their digits",
        area="C++ kernels",
        file="kernels/hf_spec_kernels/eight_bit_linear/kernel.cpp",
        old="if (size < LEAST) return std::nearbyint(value * SUBNORMALS) / SUBNORMALS;",
        new="if (size < LEAST) return value;",
        tests=("tests/kernels/test_eight_bit_linear.py::test_states_are_rounded_to_float16_first",),
    ),
)

"""The engine: masks, positions, KV cache, verification, stopping, batches, clean-up."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "a node attends to its sibling",
        area="attention masks",
        file="hf_spec/engine/forward/draft_tree.py",
        old="mask[node] = mask[self.parent[node]]",
        new="mask[node] = mask[node - 1]",
        tests=(
            "tests/engine/forward/test_draft_tree.py"
            "::test_ancestor_mask_is_the_walk_up_the_parents",
        ),
    ),
    Mutant(
        "a sliding window shows one key too many",
        area="attention masks",
        file="hf_spec/engine/forward/attention_span.py",
        old="return position - window + 1 if",
        new="return position - window if",
        tests=("tests/engine/forward/test_attention_span.py::test_a_window_counts_positions",),
    ),
    Mutant(
        "a later part of a prompt does not see the parts before it",
        area="attention masks",
        file="hf_spec/engine/forward/sdpa_attention.py",
        old="only_causal = segment.num_tokens == segment.num_keys and",
        new="only_causal =",
        tests=(
            "tests/engine/forward/test_sdpa_attention.py"
            "::test_a_prompt_attends_in_blocks_as_token_by_token",
        ),
    ),
    Mutant(
        "a draft runs in the forward pass of a long prompt",
        area="attention masks",
        file="hf_spec/engine/runner.py",
        old="longest = STEP_TOKENS if self._attention else PREFILL_CHUNK",
        new="longest = PREFILL_CHUNK",
        tests=("tests/engine/fast/test_layer_call.py::test_prompts_run_compiled_as_steps_do",),
    ),
    Mutant(
        "a chunk is a sliding window",
        area="attention masks",
        file="hf_spec/engine/forward/attention_span.py",
        old="return position - position % chunk",
        new="return position - chunk + 1",
        tests=(
            "tests/engine/forward/test_attention_span.py"
            "::test_a_chunk_begins_anew_at_its_multiples",
        ),
    ),
    Mutant(
        "pending tokens attend to those after them",
        area="attention masks",
        file="hf_spec/engine/forward/row_batch.py",
        old="dtype=torch.bool).tril()[:, 1:]",
        new="dtype=torch.bool)[:, 1:]",
        tests=(
            "tests/engine/forward/test_packing.py",
            "tests/engine/forward/test_tree_attention.py",
        ),
    ),
    Mutant(
        "rows whose trees have other parents share a mask",
        area="attention masks",
        file="hf_spec/engine/forward/row_batch.py",
        old="self.width, tuple(self.offsets), tuple(parents)",
        new="self.width, tuple(self.offsets)",
        tests=(
            "tests/engine/forward/test_packing.py",
            "tests/engine/test_runner.py::test_every_node_gets_the_logits_of_its_own_path",
        ),
    ),
    Mutant(
        "ALiBi counts storage places and not depths",
        area="attention masks",
        file="hf_spec/engine/forward/packing.py",
        old="root : w.num_keys] = w.root_position + depths",
        new="root : w.num_keys] = torch.arange(root, w.num_keys)",
        tests=(
            "tests/engine/forward/test_packing.py"
            "::test_rectangle_is_aligned_on_the_right_and_pads_to_the_spare_index",
        ),
    ),
    Mutant(
        "the position of a node is its index in the tree",
        area="positions",
        file="hf_spec/engine/forward/row_batch.py",
        old="[root + depth[node] for node in self.nodes]",
        new="[root + offset for offset in self.offsets]",
        tests=(
            "tests/engine/forward/test_packing.py",
            "tests/engine/test_runner.py::test_every_node_gets_the_logits_of_its_own_path",
        ),
    ),
    Mutant(
        "the offset of the position ids after an image is forgotten",
        area="positions",
        file="hf_spec/engine/forward/row_batch.py",
        old="return [position + offset for position in positions] if offset else positions",
        new="return positions",
        tests=(
            "tests/engine/forward/test_packing.py"
            "::test_position_ids_differ_from_true_positions_by_the_offset",
        ),
    ),
    Mutant(
        "padding counts as tokens for every model",
        area="positions",
        file="hf_spec/engine/models/internal_positions.py",
        old="counts = bool(tables_of(model))",
        new="counts = True",
        tests=(
            "tests/engine/models/test_internal_positions.py"
            "::test_padding_counts_where_there_is_a_table",
        ),
    ),
    Mutant(
        "scaled queries leave out the left padding",
        area="positions",
        file="hf_spec/engine/forward/packing.py",
        old="position + paddings[segment.slot]",
        new="position",
        tests=("tests/engine/models/test_query_scaling.py::test_chains_and_trees",),
    ),
    Mutant(
        "a new sequence in a row keeps the position offset of the one before",
        area="positions",
        file="hf_spec/engine/forward/row_storage.py",
        old="self.position_offsets[row] = self.paddings[row] = 0",
        new="self.paddings[row] = 0",
        tests=(
            "tests/engine/forward/test_row_storage.py"
            "::test_offsets_of_positions_end_with_their_sequence",
        ),
    ),
    Mutant(
        "the keys of a rejected node stay in front of the last accepted one",
        area="KV cache",
        file="hf_spec/engine/forward/row_storage.py",
        old="if moved < end:",
        new="if moved < end - 1:",
        tests=(
            "tests/engine/forward/test_row_storage.py",
            "tests/engine/test_runner.py::test_rounds_continue_from_the_accepted_path",
        ),
    ),
    Mutant(
        "only keys move, and values stay",
        area="KV cache",
        file="hf_spec/engine/forward/kv_pool.py",
        old="for buffers in (self.keys, self.values):\n            for buffer in",
        new="for buffers in (self.keys,):\n            for buffer in",
        tests=("tests/engine/forward/test_kv_pool.py::test_move_copies_one_slot_and_nothing_else",),
    ),
    Mutant(
        "accepted nodes that never ran count as stored",
        area="KV cache",
        file="hf_spec/engine/forward/row_storage.py",
        old="end = next((i for i, offset in enumerate(path) if offset not in ran), len(path))",
        new="end = len(path)",
        tests=("tests/engine/forward/test_row_storage.py",),
    ),
    Mutant(
        "a pool that grows loses the last token of each slot",
        area="KV cache",
        file="hf_spec/engine/forward/kv_pool.py",
        old="copied = min(self.capacity, capacity)",
        new="copied = min(self.capacity, capacity) - 1",
        tests=(
            "tests/engine/forward/test_kv_pool.py"
            "::test_capacity_grows_by_half_and_keeps_what_is_stored",
        ),
    ),
    Mutant(
        "a shortened row keeps what was stored",
        area="KV cache",
        file="hf_spec/engine/forward/row_storage.py",
        old="self.stored[row] = min(self.stored[row], length)",
        new="self.stored[row] = max(self.stored[row], length)",
        tests=("tests/engine/forward/test_row_storage.py::test_what_is_shortened_is_forgotten",),
    ),
    Mutant(
        "a reused cache that has dropped tokens is loaded to the start of the slot",
        area="KV cache",
        file="hf_spec/engine/forward/kv_pool.py",
        old="start = end - len(entries)",
        new="start, end = 0, len(entries)",
        tests=(
            "tests/engine/forward/test_kv_pool.py",
            "tests/generation/test_one_call.py::test_two_turns_with_one_cache",
        ),
    ),
    Mutant(
        "the walk goes on after an end of sequence",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="if state.stop.ends_sequence(token):",
        new="if state.stop.ends_sequence(token) and not tree.children[node]:",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "scores stay in bfloat16",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old='from the root\'s child."""\n'
        "        raw = self.raw[nodes].to(self.state.device, torch.float32, copy=True)",
        new='from the root\'s child."""\n'
        "        raw = self.raw[nodes].to(self.state.device, copy=True)",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "on a GPU the scores of all nodes stay in bfloat16",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="raw = self.raw.to(self.state.device, torch.float32, copy=True)",
        new="raw = self.raw.to(self.state.device, copy=True)",
        tests=(
            "tests/engine/decode/test_verifiers.py",
            "tests/kernels/test_wiring.py",
        ),
    ),
    Mutant(
        "a greedy row draws if another row does",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="scores = _mask_greedy_rows(scores, list(here), walk.state)",
        new="scores = scores.clone()",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "on a GPU a greedy row draws if another row does",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="scores = _mask_greedy_rows(scores, _node_rows(tree), state)",
        new="scores = scores.clone()",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "in the graph of a step greedy rows draw beside others",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="alike = len({state.draws[row] for row in state.unfinished}) == 1",
        new="alike = True",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "in the graph of a step all rows have the filters of the first",
        area="sampled verification",
        file="hf_spec/engine/decode/logits_processors.py",
        old="found = [by_row[row] for row in rows]",
        new="found = [by_row[rows[0]] for row in rows]",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "in the graph of a step processors are left out",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="filtering = any(chosen != Filter() for chosen in filters)",
        new="filtering = False",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "on a GPU one random number decides for all nodes",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="tensors.append(torch.rand(tree.num_nodes, *[2] * residual))",
        new="tensors.append(torch.rand(()).expand(tree.num_nodes, *[2] * residual))",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "logits of the output are those after the processors",
        area="greedy verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="self.logits[row].append(logits)\n"
        "        scores = self.scores_of(rows, nodes, [paths[row] for row in rows])",
        new="pass\n"
        "        scores = self.scores_of(rows, nodes, [paths[row] for row in rows])\n"
        "        if self.state.keep_logits:\n"
        "            for row, logits in zip(rows, scores, strict=True):\n"
        "                self.logits[row].append(logits)",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "the residual distribution is not renormalized",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="target = torch.where(rejected, _normalized(residual, target), target)",
        new="target = torch.where(rejected, residual, target)",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "siblings are judged as if they were drawn with replacement",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="others = draft.scatter(1, token, 0.0)",
        new="others = draft",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "a token that the target excludes is accepted by a uniform of zero",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="fits = (uniforms * draft.gather(1, token) < target",
        new="fits = (uniforms * draft.gather(1, token) <= target",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "a rejected token is drawn again from the target's distribution",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="residual = (target - draft).clamp_(min=0)",
        new="residual = target",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "one random number decides for all rows",
        area="sampled verification",
        file="hf_spec/engine/decode/verifiers.py",
        old="uniforms = torch.rand(token.shape, device=target.device)",
        new="uniforms = torch.rand((), device=target.device).expand(token.shape)",
        tests=(
            "tests/engine/decode/test_verifiers.py",
            "tests/test_batch_distribution.py",
        ),
    ),
    Mutant(
        "draws on a GPU race with uniform times",
        area="sampled verification",
        file="hf_spec/engine/decode/sampling.py",
        old="torch.empty_like(rates).exponential_()",
        new="torch.rand_like(rates)",
        tests=("tests/engine/decode/test_sampling.py",),
    ),
    Mutant(
        "the lossy rule of GSD divides the wrong way",
        area="sampled verification",
        file="hf_spec/drafting/lossy_rules.py",
        old="float(torch.rand(())) * tree.node_probs[child] < float(probs[token])",
        new="float(torch.rand(())) * float(probs[token]) < tree.node_probs[child]",
        tests=("tests/drafting/test_lossy_rules.py",),
    ),
    Mutant(
        "all rows share a processor that remembers its calls",
        area="logits processors",
        file="hf_spec/engine/decode/logits_processors.py",
        old='copies = (independent_copy(processor, f"{num_rows} rows") for _ in '
        "range(num_rows - 1))",
        new="copies = (processor for _ in range(num_rows - 1))",
        tests=("tests/engine/decode/test_logits_processors.py::test_user_written_processors",),
    ),
    Mutant(
        "processors see the committed text instead of a node's prefix",
        area="logits processors",
        file="hf_spec/engine/decode/verifiers.py",
        old="prefixes = self.state.prefixes(rows, paths) if",
        new="prefixes = self.state.prefixes(rows, [()] * len(rows)) if",
        tests=("tests/engine/decode/test_verifiers.py",),
    ),
    Mutant(
        "samples of one prompt get the entries of other prompts",
        area="logits processors",
        file="hf_spec/engine/decode/logits_processors.py",
        old="indices = [row * len(entries) // num_rows for row in range(num_rows)]",
        new="indices = [row % len(entries) for row in range(num_rows)]",
        tests=(
            "tests/engine/decode/test_logits_processors.py"
            "::test_one_prompt_serves_the_rows_that_num_return_sequences_makes_of_it",
        ),
    ),
    Mutant(
        "a processor that reads token ids gets the scores of some tokens only",
        area="logits processors",
        file="hf_spec/engine/decode/logits_processors.py",
        old="for later in self._steps[index:])",
        new="for later in self._steps[index + 1 :])",
        tests=("tests/engine/decode/test_logits_processors.py",),
    ),
    Mutant(
        "an error in the processor of one row ends all rows",
        area="logits processors",
        file="hf_spec/engine/decode/logits_processors.py",
        old="self._on_error(row, error)",
        new="raise",
        tests=(
            "tests/engine/decode/test_logits_processors.py",
            "tests/engine/decode/test_row_failures.py",
        ),
    ),
    Mutant(
        "a stop string that ends inside a draft is not cut",
        area="stopping",
        file="hf_spec/engine/decode/generation_state.py",
        old="if self._ends[row] is None and stop.end_row(token, length, padded_ids):",
        new="last = index == accepted\n"
        "                if last and self._ends[row] is None and stop.end_row(token, "
        "length, padded_ids):",
        tests=(
            "tests/engine/decode/test_stopping.py::test_end_of_sequence_cuts_the_block_of_its_row",
            "tests/test_identity.py::test_a_stop_rule_cuts_an_accepted_block",
        ),
    ),
    Mutant(
        "the maximum length does not count the left padding",
        area="stopping",
        file="hf_spec/engine/decode/generation_state.py",
        old="length, padded_ids = self.padded_length(row), partial",
        new="length, padded_ids = len(self.tokens[row]), partial",
        tests=(
            "tests/engine/decode/test_stopping.py"
            "::test_maximum_length_counts_padding_and_the_lowest_one_rules",
        ),
    ),
    Mutant(
        "a sequence has one token more than the maximum length",
        area="stopping",
        file="hf_spec/engine/decode/stopping.py",
        old="length >= self.max_length",
        new="length > self.max_length",
        tests=("tests/engine/decode/test_stopping.py",),
    ),
    Mutant(
        "batch criteria are evaluated once per round instead of once per token",
        area="stopping",
        file="hf_spec/engine/decode/generation_state.py",
        old="while self._reached(stop, rows, step := self._evaluated[rows[0]] + 1):",
        new="if self._reached(stop, rows, step := self._evaluated[rows[0]] + 1):",
        tests=("tests/engine/decode/test_stopping.py",),
    ),
    Mutant(
        "rows that wait for each other are not cut where the last one ends",
        area="stopping",
        file="hf_spec/engine/decode/generation_state.py",
        old="return max(ends)",
        new="return max(self.generated)",
        tests=("tests/engine/decode/test_stopping.py",),
    ),
    Mutant(
        "a batch criterion ends all rows if it ends one",
        area="stopping",
        file="hf_spec/engine/decode/stopping.py",
        old="return [not runs for runs in running.tolist()]",
        new="return [not all(running.tolist())] * self.num_rows",
        tests=("tests/engine/decode/test_stopping.py",),
    ),
    Mutant(
        "tokens that a criterion may still remove are streamed",
        area="streaming",
        file="hf_spec/engine/decode/generation_state.py",
        old="min(length, done) if stop.has_batch_criteria else length",
        new="length",
        tests=(
            "tests/engine/decode/test_generation_state.py"
            "::test_tokens_that_may_still_be_cut_are_held_back",
        ),
    ),
    Mutant(
        "half a character is streamed",
        area="streaming",
        file="hf_spec/engine/decode/streaming.py",
        old="if wait and text.endswith(INCOMPLETE):",
        new="if wait and not text:",
        tests=("tests/engine/decode/test_streaming.py",),
    ),
    Mutant(
        "tokens that a stop removed stay counted",
        area="statistics",
        file="hf_spec/engine/decode/row_tokens.py",
        old=".discount(depths[len(depths) - surplus :])",
        new=".discount([])",
        tests=(
            "tests/engine/decode/test_generation_state.py",
            "tests/common/test_outputs.py",
        ),
    ),
    Mutant(
        "the bonus token counts as accepted",
        area="statistics",
        file="hf_spec/engine/decode/generation_state.py",
        old="min(accepted, gained), gained",
        new="gained, gained",
        tests=("tests/engine/decode/test_generation_state.py",),
    ),
    Mutant(
        "tau counts bonus tokens",
        area="statistics",
        file="hf_spec/common/outputs.py",
        old="return self.accepted_tokens / max(self.rounds, 1)",
        new="return self.new_tokens / max(self.rounds, 1)",
        tests=("tests/common/test_outputs.py",),
    ),
    Mutant(
        "the acceptance rate is per round",
        area="statistics",
        file="hf_spec/common/outputs.py",
        old="return self.accepted_tokens / max(self.drafted_tokens, 1)",
        new="return self.accepted_tokens / max(self.rounds, 1)",
        tests=("tests/common/test_outputs.py",),
    ),
    Mutant(
        "a drafter keeps the text of the sequence before in a slot",
        area="continuous batching",
        file="hf_spec/engine/decode/continuous_batching.py",
        old="self._target.restart(row)\n        self._drafter.restart(row)",
        new="self._target.restart(row)",
        tests=("tests/engine/decode/test_continuous_batching.py",),
    ),
    Mutant(
        "the target keeps the keys of the sequence before in a slot",
        area="continuous batching",
        file="hf_spec/engine/decode/continuous_batching.py",
        old="self._target.restart(row)\n        self._drafter.restart(row)",
        new="self._drafter.restart(row)",
        tests=(
            "tests/engine/decode/test_continuous_batching.py"
            "::test_a_slot_forgets_the_sequence_before",
            "tests/engine/decode/test_continuous_batching.py::test_each_is_answered_as_if_alone",
        ),
    ),
    Mutant(
        "nodes attend to gaps between stored tokens",
        area="EMS-SD",
        file="hf_spec/engine/forward/padded_batching.py",
        old="committed = (before >= 0).expand(len(self.nodes), -1)",
        new="committed = (before > -2).expand(len(self.nodes), -1)",
        tests=(
            "tests/engine/forward/test_padded_batching.py::test_gaps_are_hidden_in_packed_segments",
        ),
    ),
    Mutant(
        "in a rectangle nodes attend to gaps between stored tokens",
        area="EMS-SD",
        file="hf_spec/engine/forward/packing.py",
        old="inputs.visible[w.row, begin:, :root] = before >= 0",
        new="inputs.visible[w.row, begin:, :root] = True",
        tests=(
            "tests/engine/forward/test_padded_batching.py::test_gaps_are_hidden_in_a_rectangle",
        ),
    ),
    Mutant(
        "aligned rows go on where the row with the fewest pending tokens does",
        area="EMS-SD",
        file="hf_spec/engine/forward/padded_batching.py",
        old="self._front + max(pending.values(), default=0)",
        new="self._front + min(pending.values(), default=0)",
        tests=("tests/engine/forward/test_padded_batching.py",),
    ),
    Mutant(
        "idle rows write their padding over stored tokens",
        area="EMS-SD",
        file="hf_spec/engine/forward/padded_batching.py",
        old="free = max(stored_end, root + max(ran, default=-1) + 1)",
        new="free = max(ran, default=-1) + 1",
        tests=("tests/engine/forward/test_padded_batching.py",),
    ),
    Mutant(
        "padding attends to all nodes",
        area="EMS-SD",
        file="hf_spec/engine/forward/padded_batching.py",
        old="lines = seen.new_zeros(self.fill, seen.shape[1])",
        new="lines = seen.new_ones(self.fill, seen.shape[1])",
        tests=(
            "tests/engine/forward/test_padded_batching.py"
            "::test_padding_sees_as_the_root_and_is_seen_by_nobody",
        ),
    ),
    Mutant(
        "a stored state is used for a shorter path after its padding",
        area="recurrent layers",
        file="hf_spec/engine/models/recurrent_state.py",
        old="if len(path) == length",
        new="if len(path) <= length",
        tests=(
            "tests/engine/models/test_recurrent_state.py"
            "::test_going_on_from_paths_shorter_than_the_longest",
        ),
    ),
    Mutant(
        "threads that ask at once build a value twice",
        area="model cache",
        file="hf_spec/engine/forward/model_cache.py",
        old="with cache.lock:",
        new="with threading.RLock():",
        tests=("tests/engine/forward/test_model_cache.py",),
    ),
    Mutant(
        "a forward stays replaced after an exception",
        area="clean-up",
        file="hf_spec/engine/forward/forward_overrides.py",
        old="try:\n"
        "            yield\n"
        "        finally:\n"
        "            with self._lock:\n"
        "                leave.close()",
        new="yield\n        with self._lock:\n            leave.close()",
        tests=(
            "tests/engine/forward/test_forward_overrides.py",
            "tests/engine/fast/test_packed_linear.py"
            "::test_modules_are_as_found_after_the_block_and_after_an_exception",
        ),
    ),
    Mutant(
        "the attention of a model stays replaced after an exception",
        area="clean-up",
        file="hf_spec/engine/forward/tree_attention.py",
        old="try:\n            yield\n        finally:\n            _packed_configs.ids = before",
        new="yield\n        _packed_configs.ids = before",
        tests=("tests/engine/forward/test_tree_attention.py",),
    ),
    Mutant(
        "the hook on the last layer stays after an exception",
        area="clean-up",
        file="hf_spec/engine/forward/last_layer.py",
        old="try:\n            yield\n        finally:\n            handle.remove()",
        new="yield\n        handle.remove()",
        tests=("tests/engine/forward/test_last_layer.py",),
    ),
    Mutant(
        "the option of one call decides about compiled layers after an exception",
        area="clean-up",
        file="hf_spec/engine/fast/compiled_layers.py",
        old="before, _thread.compile = _thread.compile, wanted\n"
        "    try:\n"
        "        yield\n"
        "    finally:\n"
        "        _thread.compile = before",
        new="before, _thread.compile = _thread.compile, wanted\n"
        "    yield\n"
        "    _thread.compile = before",
        tests=(
            "tests/engine/fast/test_compiled_layers.py"
            "::test_the_option_ends_with_a_call_that_fails",
        ),
    ),
    Mutant(
        "every call warms compiled layers up",
        area="compiled layers",
        file="hf_spec/generation/compiling.py",
        old="compiled.is_warm = True",
        new="compiled.is_warm = False",
        tests=("tests/generation/test_compiling.py::test_only_the_first_call_warms_up",),
    ),
    Mutant(
        "code of torch.compile runs during a generation",
        area="CUDA graphs",
        file="hf_spec/engine/runner.py",
        old="stack.enter_context(original_forwards(self.model))",
        new="original_forwards(self.model)",
        tests=("tests/engine/fast/test_torch_compile.py::test_original_code_runs",),
    ),
    Mutant(
        "a second generation runs compiled code when the first one ends",
        area="CUDA graphs",
        file="hf_spec/engine/fast/torch_compile.py",
        old=" is not None or _calls.is_installed(module)\n",
        new=" is not None\n",
        tests=("tests/engine/fast/test_torch_compile.py::test_blocks_overlap",),
    ),
    Mutant(
        "captured drafts reuse their random numbers",
        area="CUDA graphs",
        file="hf_spec/engine/fast/graph_shapes.py",
        old="if self.noise is not None:",
        new="if self.noise is not None and not self.uses:",
        tests=(
            "tests/drafting/test_captured_drafts.py::TestDraws::test_they_have_the_distribution_of_the_draft_model",
        ),
    ),
    Mutant(
        "a captured pass does not read what the pass before it computed",
        area="CUDA graphs",
        file="hf_spec/engine/fast/cuda_graphs.py",
        old="if not self._first:",
        new="if self._first:",
        tests=(
            "tests/drafting/test_captured_drafts.py::test_drafts_are_those_that_grow_on_the_host",
        ),
    ),
    Mutant(
        "captured drafts of other processors are replayed",
        area="CUDA graphs",
        file="hf_spec/drafting/level_drafter.py",
        old="self.samples, processing)",
        new="self.samples)",
        tests=(
            "tests/drafting/test_captured_drafts.py::TestKeys::test_other_processors_in_the_next_call",
        ),
    ),
    Mutant(
        "a captured head returns its last pairs, padding included",
        area="CUDA graphs",
        file="hf_spec/methods/feature_pairs/runner.py",
        old="outputs[0][others[1]]",
        new="outputs[0][-len(others[1]) :]",
        tests=(
            "tests/drafting/test_captured_drafts.py::test_drafts_are_those_that_grow_on_the_host",
        ),
    ),
    Mutant(
        "the rows that leave a captured draft are those of its capture",
        area="CUDA graphs",
        file="hf_spec/drafting/device_growth.py",
        old="self._row_places = places = self._constants.take(self._pass.places)",
        new="self._row_places = places = self._pass.places",
        tests=(
            "tests/drafting/test_captured_drafts.py::test_rows_leave_a_draft_at_their_own_depths",
        ),
    ),
    Mutant(
        "a draft that waits for the device is captured",
        area="CUDA graphs",
        file="hf_spec/engine/fast/cuda_graphs.py",
        old="if self.refusal is None and shape.uses == shape.warm_ups:",
        new="if self.refusal is None and shape.key is None:",
        tests=("tests/drafting/test_captured_drafts.py::TestFallback::test_a_draft_that_waits",),
    ),
    Mutant(
        "a draft whose capture failed is captured again",
        area="CUDA graphs",
        file="hf_spec/engine/fast/cuda_graphs.py",
        old="refused.add(shape.key)",
        new="refused.discard(shape.key)",
        tests=("tests/drafting/test_captured_drafts.py::TestFallback::test_a_capture_that_fails",),
    ),
    Mutant(
        "the default length policy waits for every level on a GPU",
        area="CUDA graphs",
        file="hf_spec/drafting/length_policy.py",
        old="    plans_ahead = True\n",
        new="    plans_ahead = False\n",
        tests=("tests/drafting/test_captured_drafts.py::test_the_default_policy_does_not_wait",),
    ),
    Mutant(
        "a repeated step is not counted",
        area="KV cache",
        file="hf_spec/engine/forward/kv_pool.py",
        old="        self.retries += 1\n        for call",
        new="        for call",
        tests=("tests/engine/fast/test_cuda_graphs.py::TestOutOfMemory::test_a_step",),
    ),
    Mutant(
        "a verification that user code has seen is repeated",
        area="KV cache",
        file="hf_spec/engine/decode/verifiers.py",
        old="        return not self.processors.reads_prefix\n",
        new="        return True\n",
        tests=(
            "tests/engine/decode/test_out_of_memory.py::"
            "test_a_processor_that_may_remember_is_not_called_again",
        ),
    ),
    Mutant(
        "a growth that is repeated is not counted",
        area="KV cache",
        file="hf_spec/engine/forward/kv_pool.py",
        old="        self.retries += 1\n        graph_store.free()\n",
        new="        graph_store.free()\n",
        tests=(
            "tests/engine/forward/test_kv_pool.py::TestOutOfMemory::test_stored_pools_are_freed",
        ),
    ),
    Mutant(
        "all that a call may need is allocated at once",
        area="KV cache",
        file="hf_spec/engine/forward/kv_pool.py",
        old="first = min(length, self._max_ahead)",
        new="first = length",
        tests=("tests/engine/forward/test_kv_pool.py::test_room_ahead_of_use_is_bounded",),
    ),
    Mutant(
        "bits of an earlier step stay in the padding of a graph",
        area="CUDA graphs",
        file="hf_spec/engine/forward/kernel_layout.py",
        old="            array.fill(0)\n",
        new="",
        tests=("tests/engine/forward/test_kernel_layout.py",),
    ),
    Mutant(
        "padding of a graph is stored in the slot of an earlier step",
        area="CUDA graphs",
        file="hf_spec/engine/fast/graph_shapes.py",
        old="        places[:, count:] = -1\n",
        new="",
        tests=("tests/engine/fast/test_graph_shapes.py",),
    ),
    Mutant(
        "inputs of an earlier step stay in the padding of a graph",
        area="CUDA graphs",
        file="hf_spec/engine/fast/graph_shapes.py",
        old="            array[len(tensor) :] = 0\n",
        new="",
        tests=("tests/engine/fast/test_graph_shapes.py",),
    ),
    Mutant(
        "the host changes inputs that the device has not read yet",
        area="CUDA graphs",
        file="hf_spec/backend/device/transfer.py",
        old="memory = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True).copy_(memory)",
        new="pass",
        tests=("tests/backend/device/test_transfer.py",),
    ),
    Mutant(
        "the last tokens of a row are streamed after it has been replaced",
        area="streaming",
        file="hf_spec/engine/decode/generation_state.py",
        old="and not any(ended) and not self.errors",
        new="and not self.errors",
        tests=("tests/engine/decode/test_generation_state.py",),
    ),
    Mutant(
        "an error in a draft keeps back tokens of the round before",
        area="streaming",
        file="hf_spec/engine/decode/loop.py",
        old="        state.stream_waiting()\n    finish_step(",
        new="        pass\n    state.stream_waiting()\n    finish_step(",
        tests=("tests/engine/decode/test_loop.py",),
    ),
    Mutant(
        "tokens are streamed while the device is idle",
        area="streaming",
        file="hf_spec/engine/decode/generation_state.py",
        old="            self._stream_waits = self._can_stream_later()\n",
        new="",
        tests=("tests/engine/decode/test_loop.py",),
    ),
)

"""Speculative decoding: draft, one packed forward pass of the target, verify, commit, observe."""

from __future__ import annotations

from functools import partial

from hf_spec.backend.cpu.packed_weights import cpu_packing_bytes
from hf_spec.common.outputs import SpecGenerateOutput, SpecStats
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.padding_scores import logits_on_padding, score_padding
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner


def speculative_decode(
    target: ModelRunner, drafter: Drafter, verifier: Verifier, state: GenerationState
) -> SpecGenerateOutput:
    """Generate until every row has met a stop rule; target and drafter are active."""
    while state.unfinished:
        speculative_step(target, drafter, verifier, state)
    update_counts(state.stats, target, drafter)
    return state.finish()


def speculative_step(
    target: ModelRunner, drafter: Drafter, verifier: Verifier, state: GenerationState
) -> None:
    """Draft for every unfinished row and verify all drafts in one forward pass of the target."""
    try:
        with state.clock("draft"):
            limits = target.limit_depths(state.draft_limits, state.tokens)
            tree = drafter.draft(state, limits)
        with state.clock("verify"):
            verifier.padding_logits = logits_on_padding(target, verifier, state, tree)
            output = target.forward(tree, state.tokens, readout=verifier.readout(tree, state))
    finally:
        # A GPU runs the forward pass meanwhile.
        state.stream_waiting()
    finish_step(target, drafter, verifier, state, tree, output)


def finish_step(
    target: ModelRunner,
    drafter: Drafter,
    verifier: Verifier,
    state: GenerationState,
    tree: DraftTree,
    output: ForwardOutput,
) -> None:
    """Verify a draft against the target's output, and commit the accepted and bonus tokens."""
    verify = partial(verifier.verify, tree, output.logits, state, output.result)
    verdict = target.rows.pool.retried(verify) if verifier.can_repeat else verify()
    state.commit(verdict)
    target.keep(verdict.paths)
    drafter.observe(verdict, output)
    score_padding(target, verifier, state)


def update_counts(stats: SpecStats, target: ModelRunner, drafter: Drafter) -> None:
    """Copy the counters of the models to `stats`."""
    stats.target_forwards = target.forwards
    stats.target_tokens = target.tokens_run
    stats.target_padding = target.padding_run
    stats.graph_replays, stats.graph_captures, stats.graph_refusal = target.graph_counts
    pool = target.rows.pool
    stats.kv_pool_bytes, stats.kv_pool_growths = pool.nbytes(), pool.growths
    stats.memory_retries = pool.retries
    stats.packed_weight_bytes = cpu_packing_bytes()
    stats.draft_forwards = drafter.forwards
    stats.counters = dict(drafter.counters)

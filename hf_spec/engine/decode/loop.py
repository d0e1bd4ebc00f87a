"""Speculative decoding: draft, one packed forward of the target, verify, commit."""

from __future__ import annotations

from hf_spec.common.outputs import SpecGenerateOutput, SpecStats
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.ended_rows import run_padding
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.runner import ModelRunner


def speculative_decode(
    target: ModelRunner, drafter: Drafter, verifier: Verifier, state: GenerationState
) -> SpecGenerateOutput:
    """Generate until every row has met a stop rule.

    Args:
        target: runs the target model; active.
        drafter: proposes draft trees; active.
        verifier: judges them against the target's logits without changing the output.
        state: the sequences; holds the result afterwards.
    """
    while state.unfinished:
        speculative_step(target, drafter, verifier, state)
    count_models(state.stats, target, drafter)
    return state.finish()


def speculative_step(
    target: ModelRunner, drafter: Drafter, verifier: Verifier, state: GenerationState
) -> None:
    """One draft for every unfinished row, judged in one forward of the target."""
    with state.clock("draft"):
        tree = drafter.draft(state, state.draft_limits)
    with state.clock("verify"):
        output = target.forward(tree, state.tokens)
    finish_step(target, drafter, verifier, state, tree, output)


def finish_step(
    target: ModelRunner,
    drafter: Drafter,
    verifier: Verifier,
    state: GenerationState,
    tree: DraftTree,
    output: ForwardOutput,
) -> None:
    """Judge a draft by the target's output and commit what is right."""
    verdict = verifier.verify(tree, output.logits, state)
    state.commit(verdict)
    target.keep(verdict.paths)
    drafter.observe(verdict, output)
    run_padding(target, verifier, state)


def count_models(stats: SpecStats, target: ModelRunner, drafter: Drafter) -> None:
    """Take over what the models have counted so far."""
    stats.target_forwards = target.forwards
    stats.target_tokens = target.tokens_run
    stats.target_padding = target.padding_run
    stats.graph_replays, stats.graph_captures, stats.graph_refusal = target.graph_counts
    stats.draft_forwards = drafter.forwards
    stats.counters = dict(drafter.counters)

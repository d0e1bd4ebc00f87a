"""Compare hf_spec, other libraries, and plain `generate()`, in turn on every prompt.

    python -m examples.studies.peers.compare --model MODEL --threads 1 --processor-time \
        --strategy auto --strategy lookup --strategy falcon \
        --assistant examples/adapters/smollm2-135m-falcon --per-task 4 --new-tokens 48 --repeats 2 \
        --peer "openvino=PYTHON -m examples.studies.peers.openvino_peer FOLDER" \
        --peer "openvino lookup=PYTHON -m examples.studies.peers.openvino_peer FOLDER --lookup"

See `full_table.by_prompt` for the method and for resuming a command. The processor seconds of a
peer are those of its own process (`peer`, `openvino_peer`).
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from examples.studies.full_table import by_prompt
from examples.studies.peers.peer import named, started


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_prompt.add_options(parser)
    parser.add_argument(
        "--peer", action="append", default=[], type=named, help="NAME=COMMAND, once or more"
    )
    parser.add_argument(
        "--other-weights", action="store_true", help="do not compare the outputs of peers"
    )
    options = parser.parse_args(argv)
    model, own_clock = by_prompt.begin(options)
    with ExitStack() as stack:
        peers = [stack.enter_context(started(*given)) for given in options.peer]

        def clock() -> float:
            # Our process clock does not count the time of peer processes, so add theirs.
            theirs = sum(peer.processor_seconds for peer in peers)
            return own_clock() + (theirs if options.processor_time else 0)

        contenders = [*by_prompt.ours(model, options), *(peer.contender for peer in peers)]
        facts = {"peers": {peer.name: peer.facts for peer in peers}}
        subject = by_prompt.Subject(
            model, contenders, clock, options.new_tokens, options.repeats, options.other_weights
        )
        by_prompt.run(options, subject, facts)


if __name__ == "__main__":
    main()

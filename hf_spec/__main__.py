"""`python -m hf_spec` is the `hf-spec` command."""

from hf_spec.cli import main

main()

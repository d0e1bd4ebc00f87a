"""`python -m hf_spec` runs the `hf-spec` command."""

from hf_spec.cli import main

main()

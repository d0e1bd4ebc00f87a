"""Sub-commands of `hf-spec` that use models: one file each; the command itself is `hf_spec.cli`."""

"""Code without models or methods, used by every package.

- User-facing basics: `errors`, `settings` (options and their help), `outputs` (statistics).
- Input and output: `files`, `hub`, `prompts`, `small_models`.
- Environment: `compat` (transformers releases), `installing` (this package), `machine` (hardware).
"""

"""The engine: draft trees, model runner, verifiers and the decoding loop; it knows no method."""

"""Choice of a method's options by measured speed (`hf-spec calibrate`)."""

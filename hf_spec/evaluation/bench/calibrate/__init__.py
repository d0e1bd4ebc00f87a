"""Options of a method chosen by measured speed (`hf-spec calibrate`)."""

"""Trained parts of the methods as folders in the shape of PEFT adapters."""

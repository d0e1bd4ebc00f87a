"""Prompts, small models and facts about the machine."""

"""draft_model/other_tokenizer."""

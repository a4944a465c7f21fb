"""The chapters of the pre-tokenizer's story, from text files to a token folder."""

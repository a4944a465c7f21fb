"""Other programs' formats: Hugging Face, GGUF, peft."""

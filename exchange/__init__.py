"""Other programs' formats: Hugging Face transformers and peft, GGUF for llama.cpp and Ollama."""

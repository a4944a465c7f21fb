"""Import and export: Hugging Face transformers and peft, GGUF for llama.cpp and Ollama, an HTML page."""

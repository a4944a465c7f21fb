"""The types that the weights of a GGUF file may have. Reading them imports no torch."""

# Type -> its help.
GGUF_TYPES = {
    "f16": "half precision",
    "f32": "as trained, for exact comparisons",
    "q8_0": "8 bits, half the size of f16",
}

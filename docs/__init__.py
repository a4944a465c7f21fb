"""The documents, and the scripts that write or check parts of them."""

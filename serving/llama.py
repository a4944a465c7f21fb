"""Serve a checkpoint by llama.cpp's server, from the package xllamacpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from generation.settings import Sampling

PARALLEL_REQUESTS = 4  # each has the whole context
REQUEST_TIMEOUT_SECONDS = 5  # a client that never completes its request holds a thread until then
# The chat template of a model that was not trained on conversations; llama.cpp's default is ChatML.
CONTINUE_TEMPLATE = "{{ messages[-1].content }}"


def start(checkpoint: Checkpoint, file: Path, name: str, host: str, port: int, key: str) -> Any:
    """Start an `xllamacpp.Server` with the defaults of generate.py; its `listening_address` is a URL. `file`: the
    checkpoint as GGUF. Raises CheckpointError if llama.cpp cannot load the file."""
    import xllamacpp

    config, sampling = checkpoint.model_config(), Sampling()
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.model_alias = {name}
    params.hostnames, params.port = [host], port
    params.api_keys = [key] if key else []
    params.timeout_read = REQUEST_TIMEOUT_SECONDS
    params.cors_origins = "localhost"  # pages from elsewhere cannot read the answers
    params.n_parallel, params.n_ctx = PARALLEL_REQUESTS, PARALLEL_REQUESTS * config.max_seq_len
    params.n_predict = sampling.max_new_tokens
    params.sampling.temp, params.sampling.top_p = sampling.temperature, sampling.top_p
    params.sampling.top_k, params.sampling.min_p = sampling.top_k, 0.0
    params.ui = params.endpoint_slots = params.fit_params = False
    params.verbosity = -1  # silent
    if checkpoint.chat_template() is None:
        params.chat_template = CONTINUE_TEMPLATE
    try:
        return xllamacpp.Server(params)
    except RuntimeError as problem:
        raise CheckpointError(f"llama.cpp cannot serve {file}: {problem}") from None

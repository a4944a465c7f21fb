"""llama.cpp's server, from the package xllamacpp, with a checkpoint of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from generation.settings import Sampling

AT_ONCE = 4  # requests; each has the whole context
# For a model that was not trained on conversations. llama.cpp would use ChatML, which it never saw.
CONTINUE = "{{ messages[-1].content }}"


def start(checkpoint: Checkpoint, file: Path, name: str, host: str, port: int, key: str) -> Any:
    """An `xllamacpp.Server` that listens, with the defaults of generate.py. `file`: the checkpoint as GGUF. Its
    `listening_address` is a URL. Raises CheckpointError if llama.cpp cannot load the file."""
    import xllamacpp

    config, sampling = checkpoint.model_config(), Sampling()
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.model_alias = {name}
    params.hostnames, params.port = [host], port
    params.api_keys = [key] if key else []
    params.cors_origins = "localhost"  # no page from elsewhere reads the answers
    params.n_parallel, params.n_ctx = AT_ONCE, AT_ONCE * config.max_seq_len
    params.n_predict = sampling.max_new_tokens
    params.sampling.temp, params.sampling.top_p = sampling.temperature, sampling.top_p
    params.sampling.top_k, params.sampling.min_p = sampling.top_k, 0.0
    params.ui = params.endpoint_slots = params.fit_params = False
    params.verbosity = -1  # silent
    if checkpoint.chat_template() is None:
        params.chat_template = CONTINUE
    try:
        return xllamacpp.Server(params)
    except RuntimeError as problem:
        raise CheckpointError(f"llama.cpp cannot serve {file}: {problem}") from None

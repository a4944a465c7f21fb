"""llama.cpp, from the package xllamacpp, running a GGUF file."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from model_config import ModelConfig

TOP = 10  # likeliest next tokens to ask for


class LlamaServer:
    """llama.cpp in this process, with a file loaded, on the CPU. If `is_exact`, it computes in fp32 where the weights
    are, so that only the file can make a difference; if not, as llama.cpp does by default."""

    def __init__(self, path: str | Path, config: ModelConfig, is_exact: bool = True) -> None:
        """Raises CheckpointError if llama.cpp cannot load the file."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = config.max_seq_len
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.warmup = params.ui = params.fit_params = False
        params.verbosity = -1  # silent
        if is_exact:  # flash attention rounds to fp16
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.port = 0  # any free one; `tokenize` asks it, on 127.0.0.1
        try:
            self.server = xllamacpp.Server(params)
        except RuntimeError as problem:
            raise CheckpointError(f"llama.cpp cannot load {path}: {problem}.") from None
        # One answer proves that its loop runs: a server that is deleted before that never ends.
        self.server.handle_completions({"prompt": [0], "n_predict": 1})

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        answer = self.ask("/tokenize", {"content": text, "add_special": False, "parse_special": False})
        return [int(i) for i in answer["tokens"]]

    def ask(self, path: str, question: dict[str, Any]) -> Any:
        """Post JSON to its server; the answer."""
        address = self.server.listening_address.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=60)  # unlike urllib, it asks no proxy
        connection.request("POST", path, json.dumps(question), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def next_tokens(self, prompt: list[int], harmless: int) -> dict[int, float]:
        """The TOP likeliest ids after the prompt, with their log-probabilities.

        `harmless` is the id of a whole character that does not end the text. A bias makes llama.cpp sample it, because
        it reports no probabilities with an end of text or a part of a character. They are those before the bias."""
        question = {"prompt": prompt, "n_predict": 1, "n_probs": TOP, "temperature": 0.0, "cache_prompt": False}
        question |= {"ignore_eos": True, "logit_bias": [[harmless, 1e6]]}
        answer = self.server.handle_completions(question)
        (token,) = answer["choices"][0]["logprobs"]["content"]
        return {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}

    def log_probability(self, prompt: list[int], token: int) -> float:
        """Return the log-probability of a token after the prompt. A prompt that continues the one before is quick."""
        question = {"prompt": prompt, "n_predict": 1, "n_probs": 1, "temperature": 0.0, "cache_prompt": True}
        answer = self.server.handle_completions(question | {"ignore_eos": True, "logit_bias": [[token, 1e6]]})
        (chosen,) = answer["choices"][0]["logprobs"]["content"]
        assert chosen["id"] == token
        return float(chosen["logprob"])

    def milliseconds_per_token(self, prompt: list[int], new_tokens: int) -> float:
        """Time greedy generation after the prompt by llama.cpp's own clock."""
        question = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0.0, "cache_prompt": False}
        answer = self.server.handle_completions(question | {"ignore_eos": True})
        return float(answer["timings"]["predicted_per_token_ms"])

"""What export and import share: a folder that is whole or absent, and models of both sides compared."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.chat import ChatTemplate
from common.checkpoint import Checkpoint
from common.errors import CheckpointError, ConfigError, DataError
from common.files import sync_directory
from exchange.hf_form import Tensors
from exchange.hf_tokenizer import probe_text, require_same_conversation, require_same_ids
from model import ModelConfig, TransformerLanguageModel
from tokenizer import Tokenizer, load_tokenizer

LARGEST_DIFFERENCE = 1e-4  # of logits, in fp32
LARGEST_SHARE_IN_DOUBLE = 1e-10  # of the largest logit, in fp64, where rounding cannot be what differs
LARGEST_SHARE_MODERN = 1e-5  # measured at 12 layers x 768: 2e-6; with the rotation the wrong way round, over 0.1
LONGEST_PROBE = 1024  # tokens


def require_transformers() -> None:
    """Raises ConfigError in one sentence. Its progress bars and warnings are switched off: what counts is checked."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "Hugging Face transformers, which reads and checks such folders, is not installed: "
            "pip install -r requirements-extras.txt"
        )
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ConfigError(
            f"transformers is {transformers.__version__}, and 5.0 or later is needed: "
            "pip install -r requirements-extras.txt"
        )
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def require_peft() -> None:
    """Raises ConfigError in one sentence."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "Hugging Face peft, which reads and checks adapters, is not installed: "
            "pip install -r requirements-extras.txt"
        )


def require_new(out: Path) -> None:
    """Raises ConfigError if something lies where a folder is to be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is already there. Name a folder that is empty or not there yet.")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into; it takes the name `out` when the body ends, and is gone if that raises.

    Raises ConfigError if something lies at `out`, CheckpointError if it cannot be written (a full disk).
    """
    require_new(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_directory(temporary)
        if out.exists():
            out.rmdir()  # which is empty; Windows renames over nothing
        os.replace(temporary, out)
    except OSError as problem:
        raise CheckpointError(
            f"{out} could not be written: {problem.strerror or problem}. Nothing is left of it; put that right or "
            "name a folder elsewhere."
        ) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(out.parent)


def load_in_fp32(checkpoint: Checkpoint) -> tuple[TransformerLanguageModel, Tokenizer]:
    """The model in fp32 on the CPU, whatever generation would take. Raises CheckpointError or TokenizerError."""
    config = checkpoint.trusted_config()
    path = checkpoint.tokenizer_path()
    tokenizer = load_tokenizer(path)
    require_fitting(tokenizer, config, path)
    model = TransformerLanguageModel(config)
    checkpoint.load_weights(model)
    return model.eval(), tokenizer


def require_fitting(tokenizer: Tokenizer, config: ModelConfig, source: Path) -> None:
    """Raises DataError if the tokenizer has ids that the model lacks."""
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"The tokenizer of {source} has {tokenizer.vocab_size:,} ids and the model {config.vocab_size:,}: it is "
            "the tokenizer of another model."
        )


def load_theirs(folder: Path) -> Any:
    """The model as transformers reads it, in fp32. Nothing is downloaded, and no code of the folder is run."""
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    return theirs.eval()


def load_their_tokenizer(folder: Path, config: Any = None) -> Any:
    """`config` (of transformers) stands in for the folder's config.json, which says which class a tokenizer has."""
    from transformers import AutoTokenizer

    named = {} if config is None else {"config": config}
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **named)


def require_same_tokens(folder: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
    """Raises TokenizerError where transformers reads the tokenizer of an exported folder otherwise, or its template."""
    theirs = load_their_tokenizer(folder)
    if template:
        require_same_ids(tokenizer, theirs, split_special_tokens=True)
        require_same_conversation(template, tokenizer, theirs)
    else:
        require_same_ids(tokenizer, theirs)


def build_theirs(hf_config: dict[str, Any], tensors: Tensors, tied: bool) -> Any:
    """The model of a foreign config and its tensors, put together by transformers, in fp32.

    Of the config it sees what its class has of its own: the rest (a number of labels, a quantization, an adapter) could
    take any memory, and is nothing that `from_hf` knows.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, NanoChatConfig, NanoChatForCausalLM

    kinds = {"gpt2": (GPT2Config, GPT2LMHeadModel), "nanochat": (NanoChatConfig, NanoChatForCausalLM)}
    config_class, model_class = kinds[hf_config["model_type"]]
    # Before transformers 5.4 a class says in its __init__ what it has.
    own = inspect.get_annotations(config_class) or inspect.signature(config_class).parameters
    known = {key: value for key, value in hf_config.items() if key in own}
    theirs: Any = model_class(config_class(**{**known, "tie_word_embeddings": tied}))
    missing, unknown = theirs.load_state_dict(tensors, strict=False, assign=True)  # no second copy in memory
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    theirs.tie_weights()
    return theirs.float().eval()


@torch.inference_mode()
def least_likely(model: TransformerLanguageModel, tokenizer: Tokenizer) -> int:
    """The id whose highest probability, at any place of the probe text, is the lowest of all."""
    probabilities = model(probe_tokens(model, tokenizer)).softmax(-1)  # (1, T, V)
    return int(probabilities[0, :, : tokenizer.vocab_size].amax(0).argmin())


def probe_tokens(model: TransformerLanguageModel, tokenizer: Tokenizer) -> torch.Tensor:
    """(1, T) ids of the probe text, up to the length of the context."""
    ids = tokenizer.encode(probe_text(tokenizer))
    return torch.from_numpy(np.resize(ids, (1, min(model.config.max_seq_len, LONGEST_PROBE))).astype(np.int64))


class Difference(NamedTuple):
    """Of two models' logits; `in_double` (fp64), and what they reach, where rounding had to be told from a fault."""

    in_single: float
    in_double: float | None = None
    largest_logit: float = 0.0

    def __str__(self) -> str:
        rounding = f" (rounding: they reach {self.largest_logit:.3g}, and in fp64 differ by {self.in_double or 0:.2g})"
        return f"{self.in_single:.2g} at most" + (rounding if self.in_double is not None else "")


def largest_difference(
    model: TransformerLanguageModel, theirs: Any, tokenizer: Tokenizer, whose: str = "transformers"
) -> Difference:
    """The largest difference of the logits on the probe text, in fp32, up to the length of the context. `theirs` is a
    model of `whose`, or another one of ours.

    Raises CheckpointError if it is beyond LARGEST_DIFFERENCE, and not for rounding: the activations of a large GPT-2
    reach thousands, and what two orders of summation make of them differs by as much. In fp64 it does not. The modern
    form computes norms and angles in fp32 whatever its weights are: there, what tells is the share of the logits.
    """
    tokens = probe_tokens(model, tokenizer)
    in_single, _ = difference_of_logits(model, theirs, tokens)
    if in_single <= LARGEST_DIFFERENCE:
        return Difference(in_single)
    in_double, largest = difference_of_logits(model.double(), theirs.double(), tokens)
    model.float()
    share = LARGEST_SHARE_MODERN if model.config.position == "rope" else LARGEST_SHARE_IN_DOUBLE
    if not in_double <= share * largest:  # which NaN is not
        raise CheckpointError(
            f"{whose} computes other logits from these weights: they differ by {in_single:.3g} (in fp64 by "
            f"{in_double:.3g}). This is a fault of the conversion, please report it."
        )
    return Difference(in_single, in_double, largest)


@torch.inference_mode()
def difference_of_logits(model: TransformerLanguageModel, theirs: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and the largest logit. Theirs may have more ids, of which ours knows nothing."""
    logits, answer = model(tokens), theirs(tokens)
    other = answer if isinstance(answer, torch.Tensor) else answer.logits
    return (logits - other[..., : logits.shape[-1]]).abs().max().item(), logits.abs().max().item()

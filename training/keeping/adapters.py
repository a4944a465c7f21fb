"""LoRA in a run: the base that its adapters are for."""

from __future__ import annotations

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import sha256_file
from common.lora import add_adapters, find_base
from common.publishing import CHECKPOINT_NAME
from common.tensors import weights_file
from model import TransformerLanguageModel
from training.config import Config
from training.keeping.resume import own_checkpoint


def adapt(model: TransformerLanguageModel, config: Config) -> None:
    """If the configuration asks for adapters, load their base into the model, add them, and print what trains.

    Raises ConfigError for a rank larger than the model, CheckpointError for a base that is missing or unsuitable.
    """
    if not config.lora_rank:
        return
    narrowest = min(model.config.embed_dim, model.config.ff_dim)
    if config.lora_rank > narrowest:
        raise ConfigError(
            f"lora_rank is {config.lora_rank}, and the model's matrices have {narrowest} rows or columns: a rank "
            "beyond that adds nothing. 8 is usual."
        )
    base = base_checkpoint(config)
    if config.resume == "never" and base.path.resolve().is_relative_to(config.run_dir.resolve()):
        raise CheckpointError(
            f"The adapters would be for {base.path}, which --resume never sets aside with the run that is in "
            f"{config.run_dir}: choose another --output_dir."
        )
    if CHECKPOINT_NAME.fullmatch(base.path.name):
        print(f"Note       adapters need their base, and {base.path} is replaced when its run trains on: keep a copy")
    base.load_weights(model)
    add_adapters(model, config.lora(str(base.path), sha256_file(weights_file(base.path))))
    trained = model.num_parameters(trained_only=True)
    print(
        f"LoRA       rank {config.lora_rank} on {config.lora_targets.replace(',', ', ')}: {trained:,} parameters "
        f"train, those of {base.path} stay as they are"
    )


def base_checkpoint(config: Config) -> Checkpoint:
    """The base of the run that this configuration continues, for by now `init_from` may lead to a newer checkpoint of
    the run that it names; for a run that starts, what it leads to.

    Raises CheckpointError for a start from adapters, and for going on from weights that have none.
    """
    named = config.resume_from or config.init_from
    assert named is not None, "the configuration sees to it"
    own = own_checkpoint(config)
    checkpoint = own or open_checkpoint(named)
    lora = checkpoint.lora()
    if lora is not None and (own is not None or config.resume_from):
        return Checkpoint(find_base(lora, checkpoint.path))
    if lora is not None:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters, and those of --lora_rank are for whole weights: python "
            f"tools/merge_lora.py {checkpoint.path} OUT makes them, to start from with --init_from OUT."
        )
    if own is None and config.resume_from:
        raise CheckpointError(
            f"{checkpoint.path} was trained without adapters, and cannot go on with some: --init_from "
            f"{checkpoint.path} instead of --resume_from starts a new run that adapts it."
        )
    return checkpoint

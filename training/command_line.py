"""The trainer's command line -> Config: defaults, a config file and flags; later ones win, all problems are reported.

Torch is not imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import name_of, read_json
from common.flags import Parser, add_debug
from common.validation import check, fields_of, suggest
from generation.settings import FLAGS as GENERATION_FLAGS
from tokenization.settings import FLAGS as TOKENIZATION_FLAGS
from training.config import (
    AUTOMATIC_SOURCES,
    MODEL_KEYS,
    MODEL_SIZES,
    OURS,
    REPOSITORY,
    SCHEMA,
    Config,
    counts,
    is_resolved,
    scope_of,
)

ELSEWHERE = {
    **dict.fromkeys(GENERATION_FLAGS.keys() - SCHEMA.keys(), "generate.py"),
    **dict.fromkeys(TOKENIZATION_FLAGS.keys() - SCHEMA.keys(), "tokenize_local_bpe.py"),
}


def parse_config(argv: Sequence[str] | None = None, chosen: Mapping[str, Any] | None = None, by: str = "") -> Config:
    """Combine defaults, config file and flags; later ones win. `chosen`: in place of a config file, what a part of the
    program, `by`, chose.

    Raises ConfigError listing every problem found in any of them.
    """
    problems: list[str] = []
    flags = trainer_parser().read(argv, problems)
    config_name = flags.pop("config", None)
    layers: list[tuple[str, dict[str, Any]]] = [(by, dict(chosen))] if chosen else []
    name = "default"
    text = flags.get("input") or flags.get("data_dir") or flags.get("bin_file")
    if config_name is None and isinstance(text, str) and flags.get("minutes"):
        name = name_of(text.removeprefix("builtin:")) or name
    if config_name is not None:
        path = find_config(config_name)
        content = read_json(path, ConfigError)
        name = path.resolve().parent.name if is_resolved(content) else path.stem
        layers.append((str(path), explicit_values(content) if is_resolved(content) else content))
    layers.append(("flag", flags))

    values: dict[str, Any] = {}
    sources = dict.fromkeys(SCHEMA, "default")
    for source, layer in layers:
        if (size := layer.get("model_size")) in MODEL_SIZES:
            name = name if config_name is not None else size
            values |= preset(size)
            sources |= dict.fromkeys(preset(size), f"model_size {size}")
        # This layer overrides the run's length.
        for key, others in (("max_steps", ("epochs", "minutes")), ("minutes", ("max_steps",))):
            if key not in layer and any(layer.get(other) for other in others):
                values.pop(key, None)
                sources[key] = "default"
        for key in ("epochs", "minutes"):
            if layer.get("max_steps") and layer.get(key):
                problems.append(f"{key} and max_steps both set the length of the run ({source}); give one of them")
        values |= layer
        sources |= dict.fromkeys(layer, source)
    values |= {"name": name, "sources": sources}

    names = {key: f"--{key}" if source == "flag" else f"{key} in {source}" for key, source in sources.items()}
    of_words = (*problems, *(f"--{key} is " for key in flags))  # these say by themselves where they come from
    config = check(Config, values, problems, names, SCHEMA | {key: fields_of(Config)[key] for key in OURS})
    if problems or config is None:
        of_file = config_name is not None and not all(problem.startswith(of_words) for problem in problems)
        head = f"The configuration{f' of {layers[0][0]}' * of_file} is not valid:"
        raise ConfigError("\n  ".join([head, *problems]))
    return config


def explicit_values(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a run's resolved configuration that the user gave: with them the run can continue."""
    values, sources = resolved["config"], resolved["sources"]
    return {
        key: value
        for key, value in values.items()
        if sources.get(key, "default") not in AUTOMATIC_SOURCES and scope_of(key) != "command" and counts(key, values)
    }


def find_config(name: str) -> Path:
    """Look up a path or a bare name in the current folder, then in configs/, with or without .json."""
    names = [name] if name.endswith(".json") else [name, f"{name}.json"]
    folders = [Path(), Path("configs"), REPOSITORY / "configs"]
    for folder in folders:
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    there = sorted({path.name for folder in folders[1:] for path in folder.glob("*.json")})
    raise ConfigError(
        f"There is no config {name} in {Path.cwd()} or in configs/.{suggest(Path(name).name, there)} "
        f"There are: {', '.join(there)}."
    )


def preset(size: str) -> dict[str, Any]:
    """Return the model keys of one of MODEL_SIZES."""
    keys = read_json(REPOSITORY / "configs" / f"{size}.json", ConfigError)
    return {key: value for key, value in keys.items() if key in MODEL_KEYS}


@functools.cache
def trainer_parser() -> Parser:
    parser = Parser(
        prog="train_colab_mmap.py",
        usage="%(prog)s --config FILE [--KEY VALUE ...]",
        description="Train a GPT-2 class language model on a token file. Every flag is also a key of the config file; "
        "flags win. Running the same command again continues the run.",
        epilog="Example: python train_colab_mmap.py --config gpt2_small.json --batch_size 32",
    )
    parser.add_argument("--config", metavar="FILE", help="JSON file of keys, looked up here and in configs/")
    add_debug(parser)
    parser.add_options(SCHEMA, ELSEWHERE)
    return parser

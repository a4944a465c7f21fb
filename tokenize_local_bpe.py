"""Turn text into a token folder: a binary token file, its tokenizer, and metadata.

python tokenize_local_bpe.py --input my_text.txt
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import INTERRUPTED, ConfigError, DataError
from common.flags import Parser, add_debug
from common.script import writing_script
from common.validation import check
from tokenization.settings import DEFAULT_FOLDER, FLAGS, Settings, list_without_effect


def tokenize(
    inputs: Sequence[str],
    output_dir: str | Path = DEFAULT_FOLDER,
    *,
    quiet: bool = False,
    may_replace: bool = True,
    **settings: Any,
) -> Path:
    """Tokenize text files into `output_dir`. `settings`: fields of Settings. Return the path of the metadata.

    An interrupted call is continued by the next call with the same inputs and settings; a complete folder is left as it
    is. Files of an earlier tokenization are replaced only at the end, and without `may_replace` only by the same tokens
    (DataError otherwise).

    Raises ConfigError, DataError or TokenizerError.
    """
    paths = {key: str(value) for key, value in settings.items() if isinstance(value, Path)}
    problems: list[str] = []
    given = {"input": [*map(str, inputs)], "output_dir": str(output_dir), **settings, **paths}
    options = check(Settings, given, problems)
    if problems or options is None:
        raise ConfigError("\n".join(problems))
    from tokenization.command import tokenize_with

    return tokenize_with(options, quiet, may_replace)


def parse_arguments(argv: Sequence[str] | None) -> Settings:
    """Parse the command line. Raises ConfigError listing unknown flags, invalid values and flags without effect."""
    parser = Parser(prog="tokenize_local_bpe.py", description=__doc__)
    parser.add_options(FLAGS)
    add_debug(parser)
    problems: list[str] = []
    given = parser.read(argv, problems)
    if "input" not in given:
        problems.append("--input is missing. Name the text to tokenize, as in --input my_text.txt")
    settings = check(Settings, given, problems, {key: f"--{key}" for key in given})
    parser.require_none(problems + list_without_effect(given))
    assert settings is not None
    return settings


@writing_script(DataError)
def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_arguments(argv)
    from tokenization.command import tokenize_with  # imported here, because --help should not wait for it

    try:
        tokenize_with(settings)
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command to continue.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())

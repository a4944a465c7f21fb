"""Watch runs: losses, learning rate, speed, memory and samples, on a page that follows them while they train.

    python tools/watch.py
    python tools/watch.py runs/gpt2_small runs/gpt2_small_modern
    python tools/watch.py runs
    python tools/watch.py runs/gpt2_small --html gpt2_small.html

The page is for this machine alone. With --html it is one file that needs no server and no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, script
from common.files import atomic_write
from common.flags import Parser, add_debug, suggest
from common.formatting import byte_size
from serving.watch_page import listen, named, page
from training.file_names import METRICS
from training.telling.run_reader import RunReader


@script
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    readers = [RunReader(folder, name) for folder, name in named(arguments.runs).items()]
    if arguments.html:
        content = page([reader.read() for reader in readers])
        with atomic_write(arguments.html) as file:
            file.write(content)
        print(f"Wrote {arguments.html}: {', '.join(reader.name for reader in readers)}, {byte_size(len(content))}")
        return 0
    with listen(arguments.port, readers) as server:
        print(f"Watching   {', '.join(str(reader.folder) for reader in readers)}")
        print(f"Page       http://127.0.0.1:{server.server_port}/ for this machine alone; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """`runs` are folders that hold runs. Raises ConfigError for what is none."""
    parser = Parser(
        prog="tools/watch.py",
        usage="%(prog)s [RUN ...] [--FLAG VALUE ...]",
        description="Watch runs on a page that follows them: losses, learning rate, speed, memory, samples. Several "
        "runs lie over each other, by step, tokens or time.",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folder, or one of runs [the newest in runs/]"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page into one file and end")
    parser.add_argument("--port", type=int, default=8001, metavar="N", help="0: any that is free [8001]")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port is {arguments.port}; 0 to 65535 is allowed.")
    if arguments.html and arguments.html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html is {arguments.html}; the name of an .html file is needed, which is written anew.")
    if arguments.html and not arguments.html.parent.is_dir():
        raise ConfigError(f"There is no folder {arguments.html.parent} to write {arguments.html.name} into (--html).")
    given = arguments.runs or [newest_run(Path("runs"))]
    arguments.runs = [run for folder in given for run in runs_in(folder)]
    return arguments


def newest_run(runs: Path) -> Path:
    """The run that reported last."""
    metrics = list(runs.glob(f"*/{METRICS}"))
    if not metrics:
        raise ConfigError(f"There is no run in {runs.absolute()} that has reported; name one: tools/watch.py RUN")
    return max(metrics, key=lambda path: path.stat().st_mtime_ns).parent


def runs_in(folder: Path) -> list[Path]:
    """The run that a folder is, or the runs in it that have reported, by name. Raises ConfigError if there is none."""
    if not folder.is_dir():
        there = [path.name for path in folder.absolute().parent.glob("*/") if (path / "config.json").exists()]
        near = suggest(folder.name, there, prefix=f"{folder.parent}/")
        raise ConfigError(f"There is no run folder {folder}.{near}")
    if any((folder / name).exists() for name in (METRICS, "config.json")):
        return [folder]
    if inside := sorted(path.parent for path in folder.glob(f"*/{METRICS}")):
        return inside
    raise ConfigError(f"{folder} holds no run: there is no {METRICS} and no config.json in it.")


if __name__ == "__main__":
    sys.exit(main())

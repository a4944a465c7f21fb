"""Watch runs: losses, learning rate, speed, memory and samples, on a page that follows them while they train.

    python tools/watch.py
    python tools/watch.py runs/gpt2_small runs/gpt2_small_modern
    python tools/watch.py runs
    python tools/watch.py runs/gpt2_small --html gpt2_small.html

Only this machine can open the page. With --html it is one file that needs no server and no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError
from common.files import atomic_write
from common.flags import Parser, add_debug
from common.output import byte_size
from common.script import script
from serving.run_reader import RunReader
from serving.server import PORTS, is_port
from serving.watch_page import listen, named, newest_run, page, runs_in


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
        print(f"Page       http://127.0.0.1:{server.server_port}/ for this machine only; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """`runs` become run folders. Raises ConfigError for a folder without runs."""
    parser = Parser(
        prog="tools/watch.py",
        usage="%(prog)s [RUN ...] [--FLAG VALUE ...]",
        description="Watch runs on a page that follows them: losses, learning rate, speed, memory, samples. Several "
        "runs share the charts, by step, tokens or time.",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folder, or folder of runs [the newest run in runs/]"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page to one file and exit")
    parser.add_argument("--port", type=int, default=8001, metavar="N", help="0: any free one [8001]")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    if not is_port(arguments.port):
        raise ConfigError(f"--port is {arguments.port}; {PORTS}.")
    if arguments.html and arguments.html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html is {arguments.html}; name an .html file; one that exists is replaced.")
    if arguments.html and not arguments.html.parent.is_dir():
        raise ConfigError(f"There is no folder {arguments.html.parent} to write {arguments.html.name} into (--html).")
    given = arguments.runs or [newest_run(Path("runs"))]
    arguments.runs = [run for folder in given for run in runs_in(folder)]
    return arguments


if __name__ == "__main__":
    sys.exit(main())

"""Watch runs on a page that updates while they train: losses, learning rate, speed, memory and samples.

    python tools/watch.py
    python tools/watch.py runs/gpt2_small runs/gpt2_small_modern
    python tools/watch.py runs
    python tools/watch.py runs/gpt2_small --html gpt2_small.html

Only this machine can open the page. --html writes one file that needs no server and no network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.dataclasses import dataclass

from common.flags import Parser
from common.script import script
from common.validation import STRICT, NonEmptyText, option
from serving.run_reader import RunReader
from serving.watch_page import find_last_reported, find_runs, html_file, listen, name_runs, write_page


@dataclass(frozen=True, config=STRICT)
class Options:
    """Watch runs on a page that updates while they train: losses, learning rate, speed, memory, samples. Several runs
    share the charts, by step, tokens or time."""

    runs: tuple[str, ...] = option((), "", "run folders, or folders of runs [the newest run in runs/]", word="RUN")
    html: NonEmptyText | None = option(None, "page", "write the page to one file and exit", metavar="FILE")
    port: int = option(8001, "page", "port; 0: any free one", ge=0, le=65535)


@script
def main(argv: Sequence[str] | None = None) -> int:
    options = Parser("tools/watch.py").settings(argv, Options)
    html = html_file(options.html)
    given = [Path(run) for run in options.runs] or [find_last_reported(Path("runs"))]
    folders = name_runs([run for folder in given for run in find_runs(folder)])
    readers = [RunReader(folder, name) for folder, name in folders.items()]
    if html:
        write_page(html, readers)
        return 0
    with listen(options.port, readers) as server:
        print(f"Watching   {', '.join(str(reader.folder) for reader in readers)}")
        print(
            f"Page       http://127.0.0.1:{server.server_port}/ for this machine only; press Ctrl-C to stop", flush=True
        )
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

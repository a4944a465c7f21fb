"""Read files of a dataset on the Hugging Face hub: `hf://datasets/OWNER/NAME[@REVISION][/PATTERN]`."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.errors import DataError
from common.files import read_json, write_json
from tokenization.corpus import Source, strip_packing, unpack
from tokenization.settings import EXTRACTED, HUB

ADDRESS_PATTERN = re.compile(rf"{HUB}datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
MIN_BYTES_PER_FILE = 5_000_000  # taken from each file with --max_mb, because opening one takes seconds


@dataclass(frozen=True)
class HubSource(Source):
    """A file on the hub. Its path is that on the hub, with the commit."""

    def open(self) -> BinaryIO:
        """Open the file. Reads only the parts needed, and retries."""
        from huggingface_hub import HfFileSystem

        return unpack(HfFileSystem().open(self.path.as_posix(), "rb"))


def find_hub_sources(address: str, suffixes: tuple[str, ...], max_mb: float | None) -> list[HubSource]:
    """Return the files that an address names, at the commit of its first use. With `max_mb`, an evenly spread part of
    them.

    Raises DataError.
    """
    match = ADDRESS_PATTERN.fullmatch(address)
    if not match:
        raise DataError(f"{address} does not have the form hf://datasets/OWNER/NAME[@REVISION]/PATTERN.")
    repository, revision, pattern = match[1], match[2], (match[3] or "").strip("/")
    listing = EXTRACTED / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}.json"
    if not listing.exists():
        with hub_errors(address):
            from huggingface_hub import HfApi

            info = HfApi().dataset_info(repository, revision=revision, files_metadata=True)
        listing.parent.mkdir(parents=True, exist_ok=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or []}
        write_json(listing, {"address": address, "commit": info.sha, "files": files})
    known = read_json(listing, DataError)
    names = [
        name
        for name in sorted(known["files"])
        if strip_packing(name).endswith(suffixes)
        and (pattern != "" or not name.endswith("README.md"))
        and (not pattern or fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}/"))
    ]
    if not names:
        raise DataError(f"{address} names no text file. The dataset has {', '.join(list(known['files'])[:10])}.")
    max_bytes = math.inf
    if max_mb:
        taken = max(1, min(len(names), int(1e6 * max_mb / MIN_BYTES_PER_FILE)))
        names, max_bytes = [names[number * len(names) // taken] for number in range(taken)], 1e6 * max_mb / taken
    at = f"datasets/{repository}@{known['commit']}"
    return [HubSource(Path(at, name), f"{at}/{name}", known["files"][name], 0, max_bytes=max_bytes) for name in names]


@contextlib.contextmanager
def hub_errors(address: str) -> Iterator[None]:
    """Turn errors of the network and the hub into DataError."""
    try:
        yield
    except ImportError:
        raise DataError(f"{address} needs huggingface_hub (pip install huggingface_hub).") from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):  # or httpx2
            raise
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"{address} cannot be read: {what.rstrip('.')}. Check network and address, then run the command again."
        ) from None

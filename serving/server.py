"""What every server needs: flags for its address and limits, a socket that listens, the names it answers to. Imports no
torch."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from typing import Literal

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from common.errors import ConfigError
from common.validation import STRICT, Text, option

OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # a browser's names for this machine
UNUSED_ADDRESS = "192.0.2.1"  # reserved, belongs to nobody (RFC 5737)
# An environment variable, not a flag: every user of a machine can read the command lines of its processes.
KEY_VARIABLE = "SERVE_API_KEY"


@dataclass(frozen=True, config=STRICT)
class Settings:
    """The flags of tools/serve.py and tools/web_demo.py."""

    places: tuple[str, ...] = option(("runs",), "", "checkpoints, run folders, folders of runs", word="PATH")
    host: str = option("127.0.0.1", "address", "address to listen on; 0.0.0.0: all of them")
    port: int = option(8000, "address", "0: any free one", ge=0, le=65535)
    cors: tuple[Text, ...] = option(
        (),
        "address",
        "web pages from there may ask it, http://localhost:3000 say; *: all pages; repeatable",
        metavar="ORIGIN",
    )
    share: bool = option(False, "address", "the page alone, at an address on the internet, through Gradio's servers")
    queue: int = option(32, "limits", "requests that may wait", ge=1)
    max_tokens: int = option(4096, "limits", "the most that a text gets, whatever a request asks for", ge=1)
    timeout: float = option(300, "limits", "a text that takes longer ends where it is", gt=0, le=86400)
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "limits", "where to compute")

    @field_validator("cors")
    @classmethod
    def as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_origin, origins))


def checked_origin(origin: str) -> str:
    """An origin as browsers write it. Raises ValueError if it is none."""
    if origin == "*":
        return origin
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/\s?#]+)/?", origin.lower())
    if not found:
        raise ValueError(
            f"--cors is {origin}; the beginning of a page's address is needed, http://localhost:3000 say, or *."
        )
    scheme, host = found.groups()
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ''))}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise ConfigError(
            f"--host {host} is no address of this machine; 127.0.0.1 lets only this machine in."
        ) from None
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} is in use by another program; choose another with --port.") from None
        reason = problem.strerror or problem
        raise ConfigError(f"--host {host} --port {port} cannot be used ({reason}); choose others.") from None


def key_for(is_open: bool) -> str:
    """The key that requests need: the user's own, else a new one where other machines are let in, else "" for none.

    Raises ConfigError for a key that no HTTP header can hold.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{KEY_VARIABLE} has spaces or characters outside ASCII; choose another key.")
    return key or (secrets.token_hex(8) if is_open else "")  # a double click selects all of it


def is_own(host: str, address: str = "127.0.0.1") -> bool:
    """Whether a `Host` header names this machine. A page from elsewhere could point its own name here and read the
    answers (DNS rebinding). Browsers leave out port 80."""
    return re.sub(r":\d*$", "", host).lower() in (*OWN_HOSTS, address)


def own_address() -> str:
    """This machine's address in its network, or its name if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((UNUSED_ADDRESS, 1))  # sends nothing, but chooses the local address
        except OSError:
            return socket.gethostname()
        return str(asking.getsockname()[0])

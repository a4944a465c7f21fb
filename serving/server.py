"""Where the servers listen, and whom they answer. Imports no torch."""

from __future__ import annotations

import os
import re
import secrets
import socket

from common.errors import ConfigError

OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # a browser's names for this machine
# An environment variable, not a flag: every user of a machine can read the command lines of its processes.
KEY_VARIABLE = "SERVE_API_KEY"


def free_port(host: str, port: int) -> int:
    """The port, or any that is free for 0. Raises ConfigError if no server can listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as problem:
        reason = str(problem.strerror or problem).partition(" (")[0]
        raise ConfigError(f"--host {host} --port {port} cannot be used ({reason}); choose others.") from None


def key_for(host: str, share: bool = False) -> str:
    """The key that clients must send: the user's own, else a new one if other machines are let in, else "".

    Raises ConfigError for a key that no HTTP header can hold.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{KEY_VARIABLE} has spaces or characters outside ASCII; choose another key.")
    is_open = share or host not in ("127.0.0.1", "localhost", "::1")
    return key or (secrets.token_hex(8) if is_open else "")  # a double click selects all of it


def is_own(host: str) -> bool:
    """Whether a `Host` header names this machine. A page from elsewhere could point its own name here and read the
    answers (DNS rebinding). Browsers leave out port 80."""
    return re.sub(r":\d*$", "", host).lower() in OWN_HOSTS

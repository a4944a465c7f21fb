"""Choose the port and the key of a server. Does not import torch."""

from __future__ import annotations

import os
import re
import secrets
import socket

from common.errors import ConfigError

# Not a flag, because every user of a machine can read the command lines of its processes.
KEY_VARIABLE = "SERVE_API_KEY"


def find_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0. Raises ConfigError if a server cannot listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as problem:
        reason = str(problem.strerror or problem).partition(" (")[0]
        raise ConfigError(f"--host {host} --port {port} cannot be used ({reason}). Choose others.") from None


def choose_key(host: str, share: bool = False) -> str:
    """Return the key that clients must send: the user's own, a random one if other machines have access, or "".

    Raises ConfigError for a key that cannot be in an HTTP header.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{KEY_VARIABLE} has spaces or characters outside ASCII. Choose another key.")
    is_open = share or host not in ("127.0.0.1", "localhost", "::1")
    return key or (secrets.token_hex(8) if is_open else "")  # hexadecimal, so that a double click selects all of it

"""What every server needs: flags for its address and limits, and a socket that listens. Imports no torch."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import ipaddress
import re
import socket
from collections.abc import Sequence

from common.errors import ConfigError
from common.flags import Parser, add_debug

OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # a browser's names for this machine
UNUSED_ADDRESS = "192.0.2.1"  # reserved, belongs to nobody (RFC 5737)
PORTS = "0 to 65535 is allowed"
# An environment variable, not a flag: every user of a machine can read the command lines of its processes.
KEY_VARIABLE = "SERVE_API_KEY"


def add_flags(parser: Parser, port: int, queue: int, max_tokens: int, timeout: int) -> None:
    """Flags for the address and the limits; the numbers are the defaults."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of them [127.0.0.1]")
    parser.add_argument("--port", type=int, default=port, metavar="N", help=f"0: any free one [{port}]")
    parser.add_argument("--queue", type=int, default=queue, metavar="N", help=f"requests that may wait [{queue}]")
    parser.add_argument(
        "--max_tokens", type=int, default=max_tokens, metavar="N", help=f"the most a request may ask for [{max_tokens}]"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        metavar="SECONDS",
        help=f"a text that takes longer ends where it is [{timeout}]",
    )
    devices = ("auto", "cpu", "cuda", "mps")
    parser.add_argument("--device", choices=devices, default="auto", help="where to compute [auto]")
    add_debug(parser)


def is_port(number: int) -> bool:
    return 0 <= number <= 65535


def check_flags(arguments: argparse.Namespace, least_queue: int, packages: Sequence[str]) -> None:
    """Raises ConfigError naming each value out of range, or the missing packages."""
    problems = [
        f"--{name} is {getattr(arguments, name)}; {allowed}"
        for name, holds, allowed in (
            ("port", is_port(arguments.port), PORTS),
            ("queue", arguments.queue >= least_queue, f"{least_queue} or more is needed"),
            ("max_tokens", arguments.max_tokens >= 1, "1 or more is needed"),
            ("timeout", 0 < arguments.timeout <= 86400, "more than 0 and at most 86400 is needed"),
        )
        if not holds
    ]
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ConfigError(f"This needs {' and '.join(missing)}: pip install -r requirements-extras.txt")


def listen(host: str, port: int, remedy: str | None = None) -> socket.socket:
    """A socket that listens. Raises ConfigError if the address cannot be used. With a `remedy`, which says what to do,
    also if it lets other machines in."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise ConfigError(
            f"--host {host} is no address of this machine; 127.0.0.1 lets only this machine in."
        ) from None
    if remedy is not None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(f"--host {host} lets other machines in, and they need a key: {remedy}")
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} is in use by another program; choose another with --port.") from None
        reason = problem.strerror or problem
        raise ConfigError(f"--host {host} --port {port} cannot be used ({reason}); choose others.") from None


def listen_with_key(host: str, port: int, key: str | None) -> socket.socket:
    """Raises ConfigError as `listen` does, without a key also for an address that lets other machines in, and for a key
    that no HTTP header can hold."""
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{KEY_VARIABLE} has spaces or characters outside ASCII; choose another key.")
    remedy = (
        f"set the environment variable {KEY_VARIABLE} to a secret of your own and start again, or leave --host out."
    )
    return listen(host, port, remedy if key is None else None)


def checked_origin(origin: str) -> str:
    """A --cors value as browsers write an origin. Raises ConfigError if it is none."""
    if origin == "*":
        return origin
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/\s?#]+)/?", origin.lower())
    if not found:
        raise ConfigError(
            f"--cors is {origin}; the beginning of a page's address is needed, http://localhost:3000 say, or *."
        )
    scheme, host = found.groups()
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ''))}"


def host_name(header: str) -> str:
    """The name in a `Host` header, without the port. Browsers leave out port 80."""
    return re.sub(r":\d*$", "", header).lower()


def own_address() -> str:
    """This machine's address in its network, or its name if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((UNUSED_ADDRESS, 1))  # sends nothing, but chooses the local address
        except OSError:
            return socket.gethostname()
        return str(asking.getsockname()[0])

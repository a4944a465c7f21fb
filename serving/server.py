"""What every server of a model needs: the flags of its limits, an address to listen on, the model under its name."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.flags import Parser, add_debug

if TYPE_CHECKING:
    from serving.openai_form import Served

OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # by which a browser calls this machine
SOMEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737)


def add_flags(parser: Parser, port: int, queue: int, max_tokens: int, timeout: int) -> None:
    """Where it listens and how much it gives; the numbers are the defaults."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of them [127.0.0.1]")
    parser.add_argument("--port", type=int, default=port, metavar="N", help=f"0: any that is free [{port}]")
    parser.add_argument("--queue", type=int, default=queue, metavar="N", help=f"requests that may wait [{queue}]")
    parser.add_argument(
        "--max_tokens", type=int, default=max_tokens, metavar="N", help=f"a request may ask for [{max_tokens}]"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        metavar="SECONDS",
        help=f"after which a text ends where it is [{timeout}]",
    )
    devices = ("auto", "cpu", "cuda", "mps")
    parser.add_argument("--device", choices=devices, default="auto", help="where to compute [auto]")
    add_debug(parser)


def check_flags(arguments: argparse.Namespace, least_queue: int, packages: Sequence[str]) -> None:
    """Raises ConfigError naming each value that is out of range, or the packages that are missing."""
    problems = [
        f"--{name} is {getattr(arguments, name)}; {allowed}"
        for name, holds, allowed in (
            ("port", 0 <= arguments.port <= 65535, "0 to 65535 is allowed"),
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
    """A socket that listens. Raises ConfigError for an address that cannot be had, and for one that lets other machines
    in, if there is a `remedy`: what to do about it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise ConfigError(
            f"--host {host} is no address of this machine; 127.0.0.1 is for this machine alone."
        ) from None
    if remedy is not None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(f"--host {host} lets other machines in, and they need a key: {remedy}")
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} is in use by another program; choose another with --port.") from None
        reason = problem.strerror or problem
        raise ConfigError(f"--host {host} --port {port} cannot be listened on ({reason}); choose others.") from None


def host_name(header: str) -> str:
    """The name in a `Host` header, without the port, which browsers leave out where it is 80."""
    return re.sub(r":\d*$", "", header).lower()


def own_address() -> str:
    """This machine's address in its network, as far as it is in one; else its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((SOMEWHERE, 1))  # sends nothing, and finds out from where it would
        except OSError:
            return socket.gethostname()
        return str(asking.getsockname()[0])


def load_served(path: str | Path, device: str, max_tokens: int) -> Served:
    """The model of a checkpoint or run folder. Raises what `open_checkpoint` and `load_checkpoint` raise."""
    from common.checkpoint import open_checkpoint
    from generate import load_checkpoint
    from serving.openai_form import Served

    checkpoint = open_checkpoint(path)
    chat = checkpoint.chat_template()
    model, tokenizer = load_checkpoint(checkpoint, device)
    created = int((checkpoint.path / "config.json").stat().st_mtime)
    return Served(run_folder(checkpoint.path).name or "model", model, tokenizer, chat, created, max_tokens)


def run_folder(checkpoint: Path) -> Path:
    """That of the run whose checkpoint it is, or else the folder itself."""
    path = checkpoint.resolve()
    if path.name == "best" or re.fullmatch(r"step_\d{8}", path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path

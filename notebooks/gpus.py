"""This machine and the GPUs that Colab rents out: what fits in each of them."""

from __future__ import annotations

import contextlib

import torch

from common.formatting import byte_size
from common.machine import names_part
from model import TransformerLanguageModel
from notebooks.notebook_view import show_markdown
from training.config import parse_config
from training.machine.hardware import Hardware, detect_hardware
from training.planning.memory import fit_micro_batch

# Name in the device's name, memory in bytes, precision, and compute units an hour as others report them.
CARDS = (
    ("T4", 15.6e9, "fp16", "about 1.1"),
    ("L4", 23.6e9, "bf16", ""),
    ("A100", 42.4e9, "bf16", "7 to 13"),
    ("H100", 85.0e9, "bf16", ""),
    ("RTX PRO 6000", 101.0e9, "bf16", "about 9"),
)
COLAB_NAMES = {"RTX PRO 6000": "G4 (RTX PRO 6000)", "A100": "A100 (40 GB; there are some of 80)"}
PRESETS = ("gpt2_small", "gpt2_medium")


def describe_machine() -> None:
    """Show this machine, and a table of GPUs: how many sequences fit in each by the trainer's own estimate of
    memory."""
    hardware = detect_hardware(parse_config([]))
    print(f"Device     {hardware.name}")
    if hardware.is_cuda and hardware.memory_bytes:
        print(f"Memory     {byte_size(hardware.memory_bytes)}")
    elif not torch.cuda.is_available():
        print("There is no GPU here. In Colab: Runtime > Change runtime type. The built-in text needs none.")
    print("Precision and compiling depend on the model too: step 6 says them.")
    here = card_of(hardware.name)
    lines = [
        "| GPU | memory | precision | "
        + " | ".join(f"`{preset}`: sequences at once, forecast" for preset in PRESETS)
        + " | compute units an hour, as others report |",
        "|---" * (4 + len(PRESETS)) + "|",
    ]
    for name, memory, precision, units in CARDS:
        shown = f"{COLAB_NAMES.get(name, name)}" + (" (yours)" if name == here else "")
        fits = [sequences_at_once(preset, name, int(memory), precision) for preset in PRESETS]
        cells = [shown, byte_size(memory), precision, *fits, units or "see Colab's Resources panel"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Forecast by the trainer's estimate of memory, with a vocabulary of 32,000: step 6 tries it."]
    show_markdown("\n".join(lines))


def card_of(device_name: str) -> str | None:
    return next((name for name, *_ in CARDS if names_part(device_name, name)), None)


def sequences_at_once(preset: str, card: str, memory: int, precision: str) -> str:
    """How much of a step fits at once, for a preset with a vocabulary of 32,000, by the trainer's own estimate."""
    config = parse_config(["--config", preset])
    with torch.device("meta"):
        model = TransformerLanguageModel(config.model_config(32_000))
    hardware = Hardware(torch.device("cuda"), card, precision, "", True, "", None, memory)
    with contextlib.redirect_stdout(None):
        fitted = fit_micro_batch(config, model, hardware)
    return f"{fitted.rows_at_once} of {config.sequences_per_step}"

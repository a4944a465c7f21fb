"""Time training steps and generation on a GPU for ten minutes, and compare with nanoGPT and nanochat.

python benchmarks/gpu.py --books books.txt --peers PEERS  # PEERS contains nanogpt/model.py and nanochat/
python benchmarks/gpu.py --only machine tests steps       # some parts; a later call adds to the figures
python benchmarks/gpu.py --toy                            # tiny models on a CPU, to check that it works

Each part is a process with a time limit. Its figures are written to the JSON file, its output to --folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__":  # a script's import path is its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import RESULTS, ROOT, describe_machine, require_known_names, write_random_tokens
from common.errors import DataError
from common.files import read_json, write_json
from common.flags import Parser, add_debug
from common.script import script
from training.records import read_metrics

if TYPE_CHECKING:
    import torch

    from benchmarks.workload import TimedRun

QUESTION = "What is the capital of France?"
TOY = "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 16 --batch_size 4 --eval_interval 0"
SHAPES = [(4, 128, 256, 16), (6, 384, 512, 8), (8, 512, 512, 16)]  # layers, width, context, sequences
COMPILED_SHAPES = [(4, 256, 256, 8), (12, 768, 512, 8), (12, 768, 1024, 16)]
MODERN: dict[str, Any] = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu", "bias": False}


class Bench(NamedTuple):
    """The folders and flags of a part, and how it reports figures."""

    folder: Path
    toy: bool
    books: str | None
    peers: Path

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "cuda"

    def note(self, name: str, **figures: Any) -> None:
        """Print figures on a line that `main` reads."""
        print("FIGURES", json.dumps({name: figures}), flush=True)

    def run(self, command: str) -> str:
        """Run one of our commands; print and return its output. Raises DataError if it fails."""
        words = [sys.executable, "-u", *shlex.split(command)]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            raise DataError(f"{command}: exit code {done.returncode}")
        return done.stdout

    def tokens(self, vocab_size: int) -> Path:
        folder = self.folder / f"tokens_{vocab_size}"
        if not folder.exists():
            write_random_tokens(folder, 20_000 if self.toy else 8_000_000, vocab_size)
        return folder

    def open(self, flags: str, vocab_size: int) -> TimedRun:
        from benchmarks.workload import TimedRun

        data = f"--data_dir {self.tokens(65 if self.toy else vocab_size)} --device {self.device} --resume never"
        return TimedRun.open(shlex.split(f"{flags} {data} {TOY if self.toy else ''}"))

    def synchronize(self) -> None:
        import torch

        if not self.toy:
            torch.cuda.synchronize()

    def time(self, work: Callable[[], object], seconds: float = 0.7) -> float:
        """Return the milliseconds per call."""
        from benchmarks.workload import time_steps

        work()
        return 1000 * time_steps(work, self.synchronize, 0.01 if self.toy else seconds)[0]


def machine(bench: Bench) -> None:
    """Measure the limits of host and GPU, and which attention is faster."""
    import torch

    bench.note("machine", **describe_machine(bench.device), cudnn=torch.backends.cudnn.version())
    if bench.toy:
        return
    one = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            one.add_(1)
    large, other = (torch.randn(2**30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bench.note(
        "limits",
        us_of_an_operation=1000 * bench.time(lambda: one.add_(1), 0.1),
        us_of_a_graph_node=bench.time(graph.replay, 0.1),
        copied_tb_per_second=4 * large.numel() / bench.time(lambda: large.copy_(other), 0.1) / 1e9,
        product_tflops=2 * 8192**3 / bench.time(lambda: a @ b, 0.1) / 1e9,
    )
    for (heads, width), name in itertools.product(((12, 64), (6, 128)), ("cuDNN", "flash")):
        torch.backends.cuda.enable_cudnn_sdp(name == "cuDNN")
        shape = 64, heads, 512, width
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        ms = bench.time(functools.partial(attend, q, k, v), 0.1)
        bench.note("attention, 64 x 512 tokens, ms", **{f"{heads} x {width}, {name}": ms})


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Run causal attention forward and backward."""
    import torch

    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y.backward(q.detach())


def tests(bench: Bench) -> None:
    bench.run(f"-m pytest -q -rfE -m cuda -n {0 if bench.toy else 8} tests/cuda/")


def quickstart(bench: Bench) -> None:
    """Time the two commands of README's quickstart, recorded and not."""
    run = bench.folder / "quickstart"
    for name, flags in (("quickstart", ""), ("quickstart, not recorded", "--graphs off")):
        few = f"--max_steps 3 --vocab_size 300 --data_dir {bench.folder / 'questions'}" if bench.toy else ""
        began = time.perf_counter()
        words = f"--config quickstart.json --device {bench.device} --resume never --output_dir {run} {flags} {few}"
        output = bench.run(f"train_colab_mmap.py {words}")
        seconds, ms = time.perf_counter() - began, [row.get("ms_per_step") for row in read_metrics(run)[1:]]
        right = re.findall(r"(\d+) of (\d+) answers", output)
        bench.note(name, seconds=seconds, right=right, ms=statistics.median(filter(None, ms)))
        began = time.perf_counter()
        bench.run(f"generate.py --checkpoint {run} --prompt {shlex.quote(QUESTION)}")
        bench.note(name, answer_seconds=time.perf_counter() - began)


def steps(bench: Bench) -> None:
    """Time steps with the dial's optimizer: plain, recorded, compiled, both."""
    import torch

    for layers, width, context, rows in SHAPES[:1] if bench.toy else SHAPES + COMPILED_SHAPES:
        for compiles in (False, True) if (layers, width, context, rows) in COMPILED_SHAPES else (False,):
            training = bench.open(
                f"--config small_modern.json --num_layers {layers} --embed_dim {width} --num_heads {width // 64} "
                f"--max_seq_len {context} --batch_size {rows} --compile {'on' if compiles else 'off'}",
                4096,
            )
            form, figures = "compiled" if compiles else "plain", dict[str, float]()
            if training.recorded is not None:
                figures[f"{form}, recorded"] = bench.time(training.step)
                figures["update, recorded"] = bench.time(training.recorded.replay_update)
                training.recorded = None
                training.optimizer.zero_grad(set_to_none=True)
            bench.note(f"{layers} x {width}, {rows} x {context}, ms", **figures, **{form: bench.time(training.step)})
            del training
            torch.compiler.reset()
            torch.cuda.empty_cache()


def gpt2_small(bench: Bench, whole: bool = False) -> None:
    """Time and profile GPT-2 small, with its blocks or the `whole` model compiled."""
    import torch

    from common.graphs import GraphRecorder
    from training.recorded import RecordedStep

    name, began = f"gpt2_small{', compiled whole' if whole else ''}", time.perf_counter()
    compiles = "off" if whole or bench.toy else "on"
    training = bench.open(f"--config gpt2_small.json --compile {compiles} --graphs off", 32_000)
    if whole and not bench.toy:
        training.step_model = torch.compile(training.model, dynamic=False)
    training.step()
    bench.synchronize()
    bench.note(name, first_step_seconds=time.perf_counter() - began)
    ms, clock = bench.time(training.step, 5.0), clocks()
    bench.note(name, ms=ms, peak_gb=(training.hardware.peak_memory() or 0) / 1e9, clock=clock)
    count = 2 if bench.toy else 10
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
        for _ in range(count):
            training.step()
        bench.synchronize()
    spent: Counter[str] = Counter()
    for event in trace.events():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:60]] += event.time_range.elapsed_us() / 1000 / count
    print("\n".join(f"{ms:9.4f} ms  {kernel}" for kernel, ms in spent.most_common(40)))
    attention = {kernel: ms for kernel, ms in spent.items() if re.search("flash|fmha|cudnn|attention", kernel)}
    bench.note(name, busy_ms=sum(spent.values()), attention_ms=attention)
    if not bench.toy:
        training.recorded = RecordedStep(training, GraphRecorder())
        bench.note(name, recorded_ms=bench.time(training.step, 5.0))


def clocks() -> str:
    with contextlib.suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return ""


def generation(bench: Bench) -> None:
    """Time generation per token, with a cache of 256 and of 1,024 tokens."""
    import torch

    from generation import stream
    from generation.sampling import Sampling
    from model import TransformerLanguageModel
    from model_config import ModelConfig

    recorder, sizes = stream.build_recorder, (80, 64, 2, 2) if bench.toy else (32_000, 768, 12, 12)
    for name, form in (("GPT-2", dict[str, Any]()), ("modern", MODERN)):
        torch.manual_seed(0)
        model = TransformerLanguageModel(ModelConfig(*sizes, max_seq_len=1024, **form))
        with torch.no_grad():
            model.head.weight.mul_(8)  # spread like a trained model's logits, so that top_p removes most tokens
        model.to(bench.device, torch.bfloat16).eval()
        bias = torch.zeros(model.config.vocab_size, device=bench.device)
        for rows, count, is_recorded in itertools.product((1, 32), (40,) if bench.toy else (240, 1000), (False, True)):
            stream.build_recorder = recorder if is_recorded else lambda device: None
            prompts = torch.randint(model.config.vocab_size, (rows, 16)).tolist()
            tokens = stream.stream(model, prompts, Sampling(count, temperature=0.8, top_p=0.9), bias)
            times = [time.perf_counter(), *(time.perf_counter() for _ in itertools.islice(tokens, 100))]
            gaps = [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]
            figures = {"ms": statistics.median(gaps[len(gaps) // 2 :]), "first_ms": gaps[0]}
            bench.note(f"{name}, {rows} x {count} tokens{', recorded' * is_recorded}", **figures)
    stream.build_recorder = recorder


def nanogpt(bench: Bench) -> None:
    """Time nanoGPT's step as its train.py takes it, compiled on a GPU."""
    from benchmarks import peers
    from common.machine import pick_device

    for name in ("toy",) if bench.toy else ("gpt2_small", "shakespeare_char"):
        case, began = peers.choose_cases(not bench.toy)[name], time.perf_counter()
        tokens = str(bench.tokens(case.vocab_size))
        step = peers.build_nanogpt(
            peers.Workload(case, tokens, pick_device(bench.device), str(bench.peers / "nanogpt"))
        ).step
        step()
        bench.synchronize()
        first = time.perf_counter() - began
        bench.note(f"nanoGPT, {name}", first_step_seconds=first, ms=bench.time(step, 3.0))


def nanochat(bench: Bench) -> None:
    """Time nanochat's step at depth 12, compiled, and its decoding loop."""
    import torch

    sys.path.insert(0, str(bench.peers))
    sys.modules["nanochat.checkpoint_manager"] = types.SimpleNamespace(load_model=None)  # type: ignore[assignment]
    gpt, engine = (importlib.import_module(f"nanochat.{part}") for part in ("gpt", "engine"))
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(512, 32_000, 12, 6, 6, 768, window_pattern="L"))
    model.to_empty(device="cuda")
    model.init_weights()
    optimizer, compiled = model.setup_optimizer(), torch.compile(model, dynamic=False)
    x, y = torch.randint(32_000, (2, 64, 512), device="cuda")

    def step() -> None:
        compiled(x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.zero_grad(set_to_none=True)

    bench.note("nanochat, depth 12", ms=bench.time(step, 3.0), parameters=sum(p.numel() for p in model.parameters()))
    with torch.inference_mode():
        cache, times = engine.KVCache(1, 6, 512, 128, 12, "cuda", torch.bfloat16), list[float]()
        generator, logits = torch.Generator("cuda").manual_seed(1), model(x[:1, :16], kv_cache=cache)[:, -1]
        for _ in range(200):
            token = engine.sample_next_token(logits, generator, 0.8, 50)
            token.tolist()
            times.append(time.perf_counter())
            logits = model(token, kv_cache=cache)[:, -1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    bench.note("nanochat, depth 12", ms_of_a_token=1000 * statistics.median(gaps[50:]))


def own_text(bench: Bench) -> None:
    """Run README's command for your own text."""
    run, minutes, began = bench.folder / "own_text", 0.2 if bench.toy else 2, time.perf_counter()
    output = bench.run(
        f"train_colab_mmap.py --input {bench.books} --minutes {minutes} --device {bench.device} --resume never "
        f"--data_dir {bench.folder / 'books'} --output_dir {run} {'--compile off --epochs 1' if bench.toy else ''}"
    )
    rows = read_metrics(run)
    lines = re.findall(r"(?m)^(?:Choice|Expected|Reading|Compile) .*|First step .*", output)
    scored = [row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row]
    ms = statistics.median([row["ms_per_step"] for row in rows if "ms_per_step" in row] or [0])
    seconds, taken = time.perf_counter() - began, rows[-1]["step"]
    bench.note("own text", minutes=minutes, used=seconds / 60, lines=lines, steps=taken, scored=scored, ms=ms)


# name: (function, time limit in seconds). Each part has its own cache of compiled code.
PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "machine": (machine, 40),
    "tests": (tests, 200),
    "quickstart": (quickstart, 120),
    "generation": (generation, 80),
    "steps": (steps, 150),
    "gpt2_small": (gpt2_small, 90),
    "gpt2_small_whole": (lambda bench: gpt2_small(bench, whole=True), 120),
    "nanogpt": (nanogpt, 120),
    "nanochat": (nanochat, 120),
    "own_text": (own_text, 200),
}


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/gpu.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", metavar="PART", default=list(PARTS), help=f"any of {', '.join(PARTS)} [all]"
    )
    parser.add_argument(
        "--output", metavar="FILE", default=str(RESULTS / "gpu.json"), help="[docs/benchmarks/gpu.json]"
    )
    parser.add_argument("--folder", metavar="DIR", default="runs/gpu", help="folder for runs and outputs [runs/gpu]")
    parser.add_argument("--books", metavar="FILE", help="a text for own_text")
    parser.add_argument(
        "--peers", metavar="DIR", default=".peers", help="contains nanogpt/model.py and nanochat/ [.peers]"
    )
    parser.add_argument("--toy", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--part", help="run this part, in this process")
    add_debug(parser)
    flags = parser.parse_args(argv)
    bench = Bench(Path(flags.folder).absolute(), flags.toy, flags.books, Path(flags.peers).absolute())
    bench.folder.mkdir(parents=True, exist_ok=True)
    if flags.part:
        PARTS[flags.part][0](bench)
        return 0
    require_known_names("--only", flags.only, PARTS)
    words = ["--folder", flags.folder, "--peers", flags.peers, *(["--books", flags.books] if flags.books else [])]
    path, failed = Path(flags.output), list[str]()
    for name in flags.only:
        output, began = bench.folder / f"{name}.txt", time.perf_counter()
        command = [sys.executable, "-u", __file__, *words, *["--toy"] * flags.toy, "--part", name]
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(bench.folder / f"cache_{name}")}
        with open(output, "w", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | cache)
            try:
                code = process.wait(PARTS[name][1])
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        lines = output.read_text(encoding="utf-8").splitlines()
        figures: dict[str, Any] = read_json(path, DataError) if path.exists() else {}
        for line in lines:
            if line.startswith("FIGURES "):
                print(line, flush=True)
                ((key, values),) = json.loads(line.removeprefix("FIGURES ")).items()
                figures[key] = figures.get(key, {}) | values
        seconds = {name: {"seconds": round(time.perf_counter() - began, 1), "exit_code": code}}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures | {"parts": figures.get("parts", {}) | seconds})
        if code:
            failed.append(name)
            print("\n".join([*lines[-25:], f"{name}: exit code {code}"]), flush=True)
    print(f"Failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

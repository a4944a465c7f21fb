"""The page of a run: it shows what the folder holds, whatever state that is in, and runs no code but its own."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import watch_page
from serving.run_reader import FIELDS, MAX_STRETCHES, RunReader
from tests.helpers import ROOT, run_script
from tools import watch
from training.records import Sample, format_metrics, format_sample

ATTACK = "</script><script>document.title='hit'</script><img src=x onerror=\"document.title='hit'\">"


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 100, "tokens": 512 * step, "train_loss": 3 - step / 100, "lr": 1e-3, **more}


def write_rows(run: Path, *rows: dict[str, Any], mode: str = "w") -> None:
    with open(run / "metrics.jsonl", mode) as file:
        file.writelines(map(format_metrics, rows))


def write_samples(run: Path, prompts: list[str], *answers: tuple[int, str], expected: str | None = None) -> None:
    """`answers`: (step, answer), the same for each prompt."""
    with open(run / "samples.jsonl", "a", encoding="utf-8") as file:
        for step, answer in answers:
            asked = {"prompts": prompts, "expected": [expected] * len(prompts), "answers": [answer] * len(prompts)}
            judged = 0 if expected is None else len(prompts)
            file.write(format_sample(Sample(step=step, right=(answer == expected) * judged, judged=judged, **asked)))


def make_run(folder: Path, steps: int = 20, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    times = {"elapsed_seconds": 0.5, "ms_per_step": 50.0, "tokens_per_second": 10_240.0, "peak_memory_gb": 0.5}
    rows = [row(step, **{**times, "elapsed_seconds": step / 20}) for step in range(1, steps + 1)]
    for last in rows[9::10]:
        last |= {"val_loss": last["train_loss"] + 0.1, "val_bits_per_byte": 1.5}
    write_rows(folder, *rows)
    config = {"max_steps": 40, "learning_rate": 1e-3, "output_dir": str(folder), **settings}
    (folder / "config.json").write_text(json.dumps({"config": config, "sources": {}, "device": "a CPU"}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "plain")


def read(run: Path) -> dict[str, Any]:
    return RunReader(run, run.name).read()


# What is read


def test_a_run_is_read_as_it_stands(run: Path) -> None:
    seen = read(run)
    assert seen["columns"]["step"] == list(range(1, 21))
    assert seen["columns"]["val_loss"] == [None] * 9 + [3.0] + [None] * 9 + [2.9]
    assert set(seen["columns"]) <= set(FIELDS) and "mfu" not in seen["columns"]  # which nobody measured
    assert seen["config"] == {"max_steps": 40, "learning_rate": 0.001} and seen["device"] == "a CPU"
    assert not seen["problem"] and not seen["finished"]
    (run / "summary.md").write_text("# plain\n")
    assert read(run)["finished"]


def test_half_a_line_waits(run: Path) -> None:
    reader = RunReader(run, "plain")
    reader.read()
    line = format_metrics(row(21))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(line[:20])
        file.flush()
        assert reader.read()["columns"]["step"][-1] == 20
        file.write(line[20:])
    assert reader.read()["columns"]["step"] == list(range(1, 22))


def test_a_run_that_continues_forgets_the_steps_after_its_checkpoint(run: Path) -> None:
    """The file is shorter then; or has grown beyond its length of before by the time of the next look."""
    reader = RunReader(run, "plain")
    reader.read()
    write_rows(run, *map(row, range(1, 8)))
    assert reader.read()["columns"]["step"] == list(range(1, 8))
    write_rows(run, *(row(step, train_loss=1.5) for step in range(1, 40)))
    assert reader.read()["columns"]["train_loss"] == [1.5] * 39


def test_a_run_that_is_started_over_or_gone(run: Path) -> None:
    reader = RunReader(run, "plain")
    last = reader.read()
    run.rename(run.with_name("aside"))
    gone = reader.read()
    assert gone["problem"] == "the folder is gone" and gone["columns"] == last["columns"]
    run.mkdir()
    assert reader.read()["columns"] == {} and not reader.read()["problem"]
    write_rows(run, row(1))
    assert reader.read()["columns"]["step"] == [1]


def test_lines_that_are_no_rows_are_skipped(run: Path) -> None:
    lines = ["", "{", "[1]", "3", '{"train_loss": 1}', '{"step": "9"}', '{"step": true}', '{"step": NaN}', "[" * 9_999]
    values = ['{"step": 2, "train_loss": Infinity, "lr": "x", "mfu": 1e999, "tokens": ' + "9" * 400 + "}", "\xff\xfe"]
    (run / "metrics.jsonl").write_text("\n".join([*lines, *values]) + "\n", encoding="latin-1")
    assert read(run)["columns"] == {"step": [2]}
    json.dumps(read(run), allow_nan=False)


@pytest.mark.parametrize("content", ["{", "[1]", '{"config": [1], "device": {}}', '{"config": {"max_steps": NaN}}'])
def test_a_damaged_config_takes_nothing_away(run: Path, content: str) -> None:
    (run / "config.json").write_text(content)
    seen = read(run)
    assert len(seen["columns"]["step"]) == 20
    json.dumps(seen, allow_nan=False)
    assert bool(seen["problem"]) == (len(content) < 4)


def test_a_pipe_is_not_waited_for(run: Path, pipe: Path) -> None:
    (run / "metrics.jsonl").unlink()
    pipe.rename(run / "metrics.jsonl")
    assert "not a regular file" in read(run)["problem"]


def test_outliers_of_a_long_run_are_kept(run: Path) -> None:
    rows = [row(step, train_loss=2 + step % 7 / 10) for step in range(1, 20_001)]
    rows[7_777]["train_loss"] = 99.0
    for evaluated in rows[99::100]:
        evaluated["val_loss"] = 2.0
    write_rows(run, *rows)
    columns = read(run)["columns"]
    steps = columns["step"]
    assert len(steps) <= 4 * MAX_STRETCHES and (steps[0], steps[-1]) == (1, 20_000) and steps == sorted(steps)
    assert columns["train_loss"][steps.index(7_778)] == 99.0
    assert [s for s, loss in zip(steps, columns["val_loss"], strict=True) if loss] == list(range(100, 20_001, 100))
    assert all(rows[s - 1]["train_loss"] == loss for s, loss in zip(steps, columns["train_loss"], strict=True))


def test_samples_are_read_table_by_table(run: Path) -> None:
    write_samples(run, ["a | b", "c"], (10, " x | y\n"), expected="x | y")
    write_samples(run, ["d"], (20, "z"))
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"step": 30, "pro')
    first, second = read(run)["samples"]
    assert (first["prompts"], first["expected"]) == (["a | b", "c"], ["x | y"] * 2)
    assert first["rows"] == [{"step": 10, "right": "0 of 2", "answers": ["x | y"] * 2}]
    assert (second["prompts"], second["rows"]) == (["d"], [{"step": 20, "right": "", "answers": ["z"]}])


# The page


def write_page(tmp_path: Path, *words: object) -> str:
    done = run_script(watch.main, *words, "--html", tmp_path / "page.html")
    assert done.code == 0, done.err
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_is_one_file_that_runs_its_own_code_alone(run: Path, tmp_path: Path) -> None:
    write_samples(run, [ATTACK], (10, ATTACK))
    page = write_page(tmp_path, run)
    assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=(?!\"data:)", page) == []
    assert "http://www.w3.org/2000/svg" in page and page.count("://") == 2  # that name of a format, and nothing else
    code = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    allowed = re.findall(r"script-src '([^']*)'; ", page)
    assert allowed == [f"sha256-{base64.b64encode(hashlib.sha256(code[0].encode()).digest()).decode()}"]
    assert len(code) == 1 and "default-src 'none'" in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(data)["runs"][0]["samples"][0]["prompts"] == [ATTACK]


@contextlib.contextmanager
def opened(browser: Any, tmp_path: Path, **options: Any) -> Iterator[Any]:
    """page.html in the browser; it runs no code but its own and complains of nothing."""
    page = browser.new_page(**options)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"file://{tmp_path}/page.html")
    yield page
    page.close()
    assert complaints == []


def test_a_browser_draws_it_and_is_not_fooled(browser: Any, run: Path, tmp_path: Path) -> None:
    other = make_run(run.parent / f"b{ATTACK.replace('/', '')}", learning_rate=3e-3)
    for folder in (run, other):
        write_samples(folder, [ATTACK], (10, f"<b>{ATTACK}"), (20, "yes"), expected="yes")
    write_page(tmp_path, run, other)
    with opened(browser, tmp_path) as page:
        assert page.title() == f"plain, {other.name}"
        drawn = page.locator("main").inner_html()
    assert "<img" not in drawn and "<b>yes" not in drawn
    titles = re.findall(r"<figure[^>]*>.*?<h2>(.*?)</h2>.*?</figure>", drawn, flags=re.DOTALL)
    hidden = re.findall(r"<figure[^>]*hidden[^>]*><figcaption><h2>(.*?)</h2>", drawn)
    assert "Loss" in titles and set(hidden) == {"Gradient norm", "MFU"}
    loss = re.findall(r"<h2>Loss</h2>.*?</svg>", drawn, flags=re.DOTALL)[0]
    assert len(re.findall(r'<path d="M[\d.]+ [\d.]+L', loss)) == 2 * 3  # as measured, smoothed, validation
    assert loss.count("<circle") == 2 * 2 and "2.9000" in loss
    assert "learning_rate" in drawn and "0.003" in drawn  # what differs
    assert re.search(r"no news for|last report at", drawn) and drawn.count('class="right"') == 2


def test_one_run_is_a_card(browser: Any, run: Path, tmp_path: Path) -> None:
    write_page(tmp_path, run)
    with opened(browser, tmp_path) as page:
        facts = page.locator("#card dl > div").all_inner_texts()
        assert page.locator("#several").is_hidden() and page.locator("progress").get_attribute("value") == "0.5"
    assert facts[:2] == ["step\n20 of 40", "training loss\n2.8000"] and "best\n2.9000 at 20" in facts
    assert "left, about\n0:01" in facts  # 20 steps of 50 ms


@pytest.fixture(scope="module")
def ten_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their page, too."""
    folder = tmp_path_factory.mktemp("ten")
    for i in range(10):
        run = make_run(folder / "runs" / f"gpt2_small_modern_{i}", learning_rate=i / 1000, num_layers=i)
        question = "What is the capital of the Republic of Korea?"
        write_samples(run, [question], (20, f"Indistinguishable {i}"))
    write_page(folder, folder / "runs")
    return folder


def test_ten_runs_are_rows_and_lines_that_can_be_told_apart(browser: Any, ten_runs: Path) -> None:
    names = sorted(path.name for path in (ten_runs / "runs").iterdir())
    with opened(browser, ten_runs, viewport={"width": 1280, "height": 900}) as page:
        rows = page.locator("#overview tbody tr").all_inner_texts()
        assert [row.split()[:4] for row in rows] == [[name, "20", "of", "40"] for name in names]
        assert page.locator("#overview").bounding_box()["height"] < 450, "half a screen"
        before = page.viewport_size
        for wide in (1280, 390):
            page.set_viewport_size({"width": wide, "height": 900})
            overflow = "each => each.scrollWidth - each.clientWidth"
            assert page.locator("#several").evaluate(overflow) <= 0 and page.locator("html").evaluate(overflow) <= 0
        page.set_viewport_size(before)
        chart = page.locator("figure").first
        legend = chart.locator(".reading").inner_text()
        assert all(f"{name} training 2.8000 validation 2.9000" in " ".join(legend.split()) for name in names)
        lines = chart.locator("path[opacity], path[stroke-width='2']")  # of training as measured, of validation
        drawn = lines.evaluate_all("paths => paths.map(getComputedStyle).map(s => [s.stroke, s.strokeDasharray])")
        assert len(drawn) == 20 and len({colour for colour, _ in drawn}) == 10
        assert [dashes == "none" for _, dashes in drawn] == [True, False] * 10
        page.get_by_label(f"show {names[0]}").uncheck()
        assert names[0] not in chart.inner_text() and names[1] in chart.inner_text()


def test_settings_differ_by_what_was_trained(browser: Any, tmp_path: Path) -> None:
    """The tokens of all three have one vocabulary of 2,048, whatever their configs say of one to be made."""
    asked = {"vocab_size": 2048}, {"vocab_size": 32_000}, {"vocab_size": 32_000, "tokenizer": "char"}
    shapes = {"embed_dim": 64, "ff_dim": 256}, {"embed_dim": 64, "ff_dim": None}, {"embed_dim": 256, "ff_dim": None}
    for name, of_tokens, shape in zip("abc", asked, shapes, strict=True):
        more: dict[str, Any] = {"max_steps": 0, "epochs": 4} if name == "c" else {"epochs": 10}
        more["micro_batch_size"] = 8 if name == "b" else None
        run = make_run(tmp_path / "runs" / name, **of_tokens, **shape, **more)
        if name != "a":
            checkpoint = run / ("checkpoints/step_00000020" if name == "b" else "step_00000020")
            checkpoint.mkdir(parents=True)
            trained = {"vocab_size": 2048, "tokenizer_type": "bpe", "embed_dim": 64, "ff_dim": 256}
            (checkpoint / "config.json").write_text(json.dumps(trained))
    known = [read(tmp_path / "runs" / name)["config"] for name in "abc"]
    assert [config.get("vocab_size") for config in known] == [None, 2048, 2048], "one has no checkpoint yet"
    assert known[2]["epochs"] == 4 and "epochs" not in known[0]
    write_page(tmp_path, tmp_path / "runs")
    with opened(browser, tmp_path) as page:
        told = page.locator("#settings tbody tr").all_inner_texts()
    assert told == ["max_steps\t40\t40\t0", "micro_batch_size\tnot set\t8\tnot set"]


def test_each_of_few_steps_is_written_once(browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path, make_run(tmp_path / "short", steps=3))
    with opened(browser, tmp_path) as page:
        below = page.locator("figure").first.locator("text:not([x='47'])").all_text_contents()
    assert below == ["1", "2", "3"]


def test_watching_needs_neither_torch_nor_a_package_that_training_does_not(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tools import watch\n"
        f"assert watch.main([{str(run)!r}, '--html', {str(tmp_path / 'page.html')!r}]) == 0\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'matplotlib', 'fastapi'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


# The server


@pytest.fixture
def server(run: Path) -> Iterator[watch_page.Server]:
    with watch_page.listen(0, [RunReader(run, "plain")]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: watch_page.Server, path: str, **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def test_the_server_tells_what_is_new_and_only_that(server: watch_page.Server, run: Path) -> None:
    status, _, page = ask(server, "/")
    assert status == 200 and b'"poll_seconds": 2.0' in page and b'"name": "plain"' in page
    status, headers, content = ask(server, "/runs.json")
    assert status == 200 and json.loads(content)[0]["columns"]["step"][-1] == 20
    assert ask(server, "/runs.json", If_None_Match=headers["ETag"])[::2] == (304, b"")
    write_rows(run, row(21), mode="a")
    status, _, content = ask(server, "/runs.json", If_None_Match=headers["ETag"])
    assert status == 200 and json.loads(content)[0]["columns"]["step"][-1] == 21


def test_the_server_is_for_this_machine_alone(server: watch_page.Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for host in ("localhost:1", "127.0.0.1:80", "127.0.0.1", "LocalHost"):  # browsers leave out port 80
        assert ask(server, "/runs.json", Host=host)[0] == 200
    for host in ("evil.example:80", "evil.example", "127.0.0.1.evil:80", "127.0.0.1.evil", ""):
        assert ask(server, "/runs.json", Host=host)[0] == 403
    for path in ("/metrics.jsonl", "/../config.json", "/runs.json/"):
        assert ask(server, path)[0] == 404


def test_the_script_says_where_the_page_is_and_ends_with_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-u", str(ROOT / "tools" / "watch.py"), "--port", "0"]
    process = subprocess.Popen(command, cwd=run.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines[0] == f"Watching   {Path('runs/plain')}\n"
    port = int(re.findall(r"^Page       http://127\.0\.0\.1:(\d+)/", lines[1])[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/runs.json")
    assert json.loads(connection.getresponse().read())[0]["name"] == "plain"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err


# What keeps it from starting


def test_mistakes_in_a_command_are_reported(
    run: Path, server: watch_page.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["runs/plian"], "No run folder runs/plian. Did you mean runs/plain?"),
        ([tmp_path / "empty"], "is not a run: it has neither metrics.jsonl nor config.json."),
        ([run, "--port", "70000"], "--port is 70000; allowed:"),
        ([run, "--port", server.server_port], f"Port {server.server_port} cannot be used"),
        ([run, "--html", "nowhere/page.html"], "nowhere"),
        (["--html", "runs/plain"], "--html is runs/plain"),
        ([run, "--hmtl", "a.html"], "unknown flag --hmtl. Did you mean --html?"),
    ):
        done = run_script(watch.main, *words)
        assert done.code == 2 and said in done.err, done.err
    monkeypatch.chdir(tmp_path / "empty")
    assert "No run in" in run_script(watch.main).err


def test_a_folder_of_runs_is_all_of_them(run: Path, tmp_path: Path) -> None:
    make_run(run.parent / "other")
    (run.parent / "notes").mkdir()
    assert re.findall(r'"name": "([^"]*)"', write_page(tmp_path, run.parent)) == ["other", "plain"]


def test_the_newest_run_and_runs_of_one_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    make_run(run.parent / "newer")
    os.utime(run / "metrics.jsonl", (0, 0))
    assert '"name": "newer"' in write_page(tmp_path)
    make_run(tmp_path / "elsewhere" / "plain")
    page = write_page(tmp_path, "runs/plain", "elsewhere/plain", run, "runs/newer")
    assert re.findall(r'"name": "([^"]*)"', page) == ["runs/plain", "elsewhere/plain", "newer"]


def test_the_copies_of_a_run_show_it_as_it_was_at_the_newest(tmp_path: Path) -> None:
    copies = tmp_path / "drive" / "run"
    for step in (20, 40):
        copies.joinpath(f"step_{step:08d}-0123abcd").mkdir(parents=True)
        make_run(tmp_path / "made", steps=step).rename(copies / f"step_{step:08d}-0123abcd" / "run")
    assert watch_page.find_runs(tmp_path / "drive") == watch_page.find_runs(copies) == [copies]
    assert read(copies)["columns"]["step"][-1] == 40

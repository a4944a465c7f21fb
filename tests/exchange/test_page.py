"""The page that is sent: what it refuses, what its bytes are, and what it says in a browser, token for token."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.chat import ChatML, ChatTemplate, Message
from common.checkpoint import open_checkpoint
from exchange.folders import load_in_fp32
from exchange.page_weights import pack
from generation.completion import generate
from generation.sampling import choose
from generation.scoring import compute_likelihoods
from generation.settings import Sampling
from generation.stream import forbid_unused_ids, stream
from model import TransformerLanguageModel
from serving.demo_model import NUM_LIKELIEST, token_label
from tests.foreign_tokenizers import QWEN
from tests.helpers import ROOT, generated_text, run_script
from tests.languages import HINDI
from tests.models import CHARACTERS, MODERN, bpe, random_model, write_adapters, write_model
from tokenization.scripts import WordForm
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_bpe import PROBE_TEXT, BPETokenizer
from tools import export_page

in_browser = pytest.mark.extras("playwright")

ATTACK = "</script><script>document.title='hit'</script>{{weights}}<img src=x onerror=\"document.title='hit'\">"
LLAMA = {**MODERN, "norm_gain": True, "embed_norm": False, "activation": "swiglu", "num_kv_heads": 2, "qkv_bias": True}
FORMS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "tanh": {"activation": "gelu_tanh", "tie_embeddings": True, "bias": False, "qk_norm": True},
    "modern": MODERN,
    "llama": {**LLAMA, "head_dim": 10, "rope_base": 500.0, "rope_scaling": (4.0, 1.0, 4.0, 16.0)},
    "layernorm with rope": {"position": "rope", "embed_norm": True, "embed_dim": 72, "norm_eps": 0.01, "ff_dim": 40},
}


def written(folder: Path, *words: str) -> Path:
    """The page of the checkpoint `folder`."""
    page = folder.with_suffix(".html")
    done = run_script(export_page.main, folder, page, *words)
    assert done.code == 0, done.err
    return page


def rounded(model: TransformerLanguageModel, kind: str) -> TransformerLanguageModel:
    """The model with the weights that its page has."""
    other = TransformerLanguageModel(model.config).eval()
    other.load_weights({name: pack(name, weights, kind).weights for name, weights in model.state_dict().items()})
    return other


# What is written


def test_it_says_how_large_it_is_how_exact_and_how_to_open_it(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    done = run_script(export_page.main, tmp_path / "mine", tmp_path / "new" / "page.html")
    size = (tmp_path / "new" / "page.html").stat().st_size / 1e6
    assert (
        done.code == 0 and f"page.html, {size:.1f} MB. Rounded to int8, the most likely token is the same" in done.out
    )
    assert (tmp_path / "new" / "page.html").as_uri() in done.out


def test_rounding_is_to_the_nearest_step_of_its_block() -> None:
    weights = torch.randn(3, 130)
    weights[1] = 0
    weights[2, :64] = 1e-9
    near = pack("w", weights, "int8")
    assert len(near.data) == 3 * 3 * (2 + 64)
    for block in range(0, 130, 64):
        part, found = weights[0, block : block + 64], near.weights[0, block : block + 64]
        assert (part - found).abs().max() <= part.abs().max() / 127 * 0.6
    assert not near.weights[1:2].any() and near.weights.isfinite().all()
    assert torch.equal(pack("w", weights, "f16").weights, weights.half().float())


def test_what_is_in_the_file_cannot_become_code(tmp_path: Path) -> None:
    write_model(tmp_path / "mine", chat=ChatTemplate("a", ATTACK[:90], "c"))
    name = ATTACK.replace("/", "_")
    assert run_script(export_page.main, tmp_path / "mine", tmp_path / name).code == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script") == 4 and text.count("<img") == 0
    described = json.loads(re.findall('id="model">(.*?)</script>', text, re.DOTALL)[0])
    assert described["name"] == name.rpartition(".")[0] if "." in name else name
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in text and "unsafe-inline" not in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


# What is refused


def refused(folder: Path, *words: str) -> str:
    """The sentence; nothing is written."""
    before = sorted(folder.parent.iterdir())
    done = run_script(export_page.main, folder, folder.with_suffix(".html"), *words)
    assert done.code == 2 and sorted(folder.parent.iterdir()) == before
    return str(done.err)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    (tmp_path / "mine.html").write_text("a letter")
    assert "mine.html already exists" in refused(tmp_path / "mine")
    assert (tmp_path / "mine.html").read_text() == "a letter"


def test_too_large_a_page_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "mine", max_seq_len=100, embed_dim=128)
    monkeypatch.setattr("exchange.page.load_in_fp32", None)
    monkeypatch.setattr("exchange.page.MAX_PAGE_BYTES", 1_000_000)
    message = refused(tmp_path / "mine", "--type", "f16")
    assert re.search(r"The page would have 1 MB; .*--type int8 takes about half", message)
    monkeypatch.setattr("exchange.page.MAX_PAGE_BYTES", 200_000_000)
    monkeypatch.setattr("exchange.page.MAX_MEMORY_BYTES", 10_000)
    assert "for its context of 100 tokens" in refused(tmp_path / "mine")


def test_weights_beyond_16_bits_are_refused(tmp_path: Path) -> None:
    model = random_model(bpe().vocab_size)
    with torch.no_grad():
        model.blocks[1].feed_forward.fc2.weight[0, 0] = 1e5
    write_model(tmp_path / "mine", model=model)
    assert "blocks.1.feed_forward.fc2.weight has weights that are too large" in refused(
        tmp_path / "mine", "--type", "f16"
    )


@pytest.mark.parametrize(
    ("pattern", "words"),
    [(r"\p{N}{1,3}|\s+", "its way of splitting text is unknown"), (QWEN, "another one (qwen2)")],
)
def test_a_tokenizer_with_another_pattern_is_refused_by_name(tmp_path: Path, pattern: str, words: str) -> None:
    content = json.loads(bpe().to_json())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {**content["pre_tokenizer"], "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (tmp_path / "other.json").write_text(json.dumps(content))
    write_model(tmp_path / "mine", BPETokenizer.load(tmp_path / "other.json"))
    assert words in refused(tmp_path / "mine")


def test_chatml_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "mine", chat=ChatML())
    assert "does not support ChatML" in refused(tmp_path / "mine")


# In a browser


class Visitor:
    """Somebody with the file open; what the browser complains of, or asks of others, is an error in the end."""

    def __init__(self, browser: Any, page: Path, **options: Any) -> None:
        self.tab = browser.new_page(**options)
        self.tab.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.asked: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(request.url.partition(":")[0]))
        self.tab.goto(page.as_uri())
        self.tab.locator("#go:enabled").wait_for()

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.tab.close()
        if kind is None:
            assert self.complaints == [] and self.asked == ["file", "blob"]  # the page and its worker

    def settings(self, length: int, temperature: float = 0.0) -> None:
        self.tab.locator("summary").click()
        for name, value in (("Length", length), ("Temperature", temperature)):
            self.tab.get_by_label(name).fill(str(value))

    def write(self, text: str) -> str:
        """Return the model's last text."""
        self.tab.locator("#text").fill(text)
        self.tab.locator("#go").click()
        self.tab.locator("#go:enabled").wait_for()
        assert not (problem := self.tab.locator(".problem").text_content()), problem
        return str(self.tab.locator(".turn.model").last.text_content())

    def run(self, name: str, code: str, argument: Any) -> Any:
        """The value of an expression of `argument` and what page_`name`.js defines."""
        source = (ROOT / "exchange" / f"page_{name}.js").read_text(encoding="utf-8")
        return self.tab.evaluate(f"(argument) => {{ {source}\n return {code}; }}", argument)


def greedy(model: TransformerLanguageModel, tokenizer: Tokenizer, prompt: str | list[int], length: int) -> str:
    return generate(model, tokenizer, [prompt], Sampling(max_new_tokens=length, temperature=0))[0].text


@in_browser
@pytest.mark.parametrize("form", FORMS)
def test_it_writes_what_generate_writes_also_beyond_the_context(browser: Any, tmp_path: Path, form: str) -> None:
    """The page has the same weights: f16 of every form, int8 of one."""
    model = write_model(tmp_path / "mine", **FORMS[form])
    for kind in ("f16", "int8") if form == "modern" else ("f16",):
        with Visitor(browser, written(tmp_path / "mine", "--type", kind)) as visitor:
            visitor.settings(60)
            for prompt in ("the cat sat", "", PROBE_TEXT):  # longer than its context of 24, empty
                assert visitor.write(prompt) == greedy(rounded(model, kind), bpe(), prompt, 60), (kind, prompt)
        (tmp_path / "mine.html").unlink()


@in_browser
def test_adapters_are_merged(browser: Any, tmp_path: Path) -> None:
    write_adapters(tmp_path / "mine", tmp_path / "base")
    model, _ = load_in_fp32(open_checkpoint(tmp_path / "mine"))
    with Visitor(browser, written(tmp_path / "mine", "--type", "f16")) as visitor:
        visitor.settings(40)
        assert visitor.write("the cat") == greedy(rounded(model, "f16"), bpe(), "the cat", 40)


@in_browser
@pytest.mark.parametrize("form", [WordForm(), WordForm("qwen35", to_nfc=True)], ids=["gpt-2", "qwen35"])
def test_ids_are_the_tokenizers(browser: Any, tmp_path: Path, form: WordForm) -> None:
    """Both ways of training a vocabulary are supported."""
    tokenizer = BPETokenizer.train([PROBE_TEXT * 3, generated_text(2_000), HINDI * 3], 600, 2, *form)
    write_model(tmp_path / "mine", tokenizer)
    random = np.random.RandomState(0)
    planes = [
        *range(0x20, 0x250),
        *range(0x300, 0x400),
        *range(0x900, 0x980),
        *range(0xE01, 0xE5B),
        *range(0x2000, 0x2070),
        *range(0x4E00, 0x4E40),
        0x1F600,
        0xFEFF,
    ]
    planes += [*range(0x1C), 0x85, 0xA0, 0x3000, 0x1680, 0x661, 0x2167, *map(ord, " \n'sdmt    ")] * 5
    texts = [
        PROBE_TEXT,
        " " * 300,
        "a" * 3000,
        "'LL 'll''s \u0085x",
        HINDI,
        "it'\u017f IT'S we'Re 1234 e\u0301 \u1112\u1161\u11ab !!\n\n\u200cx\u200dy",
        *("".join(map(chr, random.choice(planes, 40))) for _ in range(300)),
    ]
    with Visitor(browser, written(tmp_path / "mine")) as visitor:
        encoding = "argument.map((text) => new BPE(given.tokenizer).encode(text))"
        found = visitor.run("tokenizer", encoding, texts)
        lone = visitor.run("tokenizer", "new BPE(given.tokenizer).encode('x\\ud800y\\udc00')", None)
    assert found == [tokenizer.encode(text).tolist() for text in texts]
    assert lone == tokenizer.encode("x\ufffdy\ufffd").tolist()


@in_browser
def test_a_model_of_characters_says_which_it_does_not_know(browser: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "mine", CHARACTERS)
    with Visitor(browser, written(tmp_path / "mine", "--type", "f16")) as visitor:
        visitor.settings(40)
        assert visitor.write("a 😀.\n") == greedy(rounded(model, "f16"), CHARACTERS, "a 😀.\n", 40)
        visitor.tab.locator("#text").fill("AB the 7 A")
        visitor.tab.locator("#go").click()
        visitor.tab.get_by_text("The model does not know these characters: A B 7").wait_for()
        assert visitor.write("b") == greedy(rounded(model, "f16"), CHARACTERS, "b", 40)


@in_browser
def test_choices_are_those_of_the_sampler(browser: Any, tmp_path: Path) -> None:
    """The random numbers are the same. Includes nearly uniform tokens, and one that is certain."""
    write_model(tmp_path / "mine")
    cases = [
        [(torch.randn(300) * spread).tolist(), temperature, top_p, uniform]
        for spread in (0.1, 3, 40)
        for temperature, top_p in ((0.0, 0.9), (0.8, 0.9), (1.5, 1.0), (0.7, 0.01))
        for uniform in (0.0, 0.3, 0.77, 0.999)
    ]
    code = "argument.map(([logits, heat, topP, u]) => { Math.random = () => u; return choose(logits, heat, topP); })"
    with Visitor(browser, written(tmp_path / "mine")) as visitor:
        found = visitor.run("writer", code, cases)
    for (logits, temperature, top_p, uniform), token in zip(cases, found, strict=True):
        sampling = Sampling(temperature=temperature, top_p=top_p)
        uniforms = torch.tensor([uniform], dtype=torch.float64)
        assert token == choose(torch.tensor([logits]), uniforms, sampling).item(), (temperature, top_p, uniform)


@in_browser
def test_a_click_shows_what_else_was_considered(browser: Any, tmp_path: Path) -> None:
    model = rounded(write_model(tmp_path / "mine", std=0.4), "f16")
    with Visitor(browser, written(tmp_path / "mine", "--type", "f16")) as visitor:
        visitor.settings(8)
        visitor.write("the cat")
        sampling = Sampling(max_new_tokens=8, temperature=0)
        bias = forbid_unused_ids(model, bpe())
        steps = stream(model, [bpe().encode("the cat").tolist()], sampling, bias)
        expected = [compute_likelihoods(logits, tokens, NUM_LIKELIEST, bias)[0] for tokens, logits in steps]
        tokens = visitor.tab.locator(".turn.model .token")
        assert tokens.count() == len(expected)
        for i in (0, 3):
            tokens.nth(i).click()
            shown = visitor.tab.locator(".considered tr").all_inner_texts()
            assert len(shown) == 8 and visitor.tab.locator(".considered").is_visible()
            for line, (token, logprob) in zip(shown, expected[i].likeliest, strict=True):
                _, label, percent = line.split("\t")
                assert label == token_label(token, bpe()).replace(" ", "\u2423").replace("\n", "\u23ce")
                assert float(percent.strip("< %")) == pytest.approx(100 * math.exp(logprob), rel=0.02, abs=0.01)
        visitor.tab.keyboard.press("ArrowRight")
        assert visitor.tab.locator(".token.active").count() == 1
        visitor.tab.keyboard.press("Escape")
        assert visitor.tab.locator(".considered").is_hidden()


@in_browser
def test_a_conversation(browser: Any, tmp_path: Path) -> None:
    """The second question is read after the first; in the third, the oldest turns make room."""
    template = ChatTemplate("S:", "U:", "A:")
    model = rounded(write_model(tmp_path / "mine", chat=template, max_seq_len=80, std=0.4), "f16")
    with Visitor(browser, written(tmp_path / "mine", "--type", "f16")) as visitor:
        visitor.settings(12)
        assert visitor.tab.locator("#text").input_value() == "What is the capital of France?"
        visitor.tab.locator("#text").fill(" ")
        visitor.tab.locator("#go").click()
        visitor.tab.get_by_text("This is a chat model. Type a question.").wait_for()
        messages: list[Message] = []
        for question in ("the cat?", " a dog\n", "the big red dog ran over the hill " * 2):
            messages.append(Message("user", question))
            ids = template.prompt_ids(bpe(), messages, 80 - 12)
            answer = visitor.write(question)
            assert answer == greedy(model, bpe(), ids, 12).lstrip()
            messages.append(Message("assistant", answer))
        assert len(ids) < len(template.prompt_ids(bpe(), messages[:-1]))
        assert visitor.tab.get_by_text("the oldest turns were dropped").count() == 1
        assert visitor.tab.locator(".turn").count() == 6
        visitor.tab.locator("#text").fill("the cat " * 100)
        visitor.tab.keyboard.press("Enter")
        visitor.tab.get_by_text("tokens, but the context is 80").wait_for()
        assert visitor.tab.locator("#text").input_value() == "the cat " * 100  # to be made shorter
        visitor.tab.locator("#clear").click()
        assert visitor.tab.locator(".turn").count() == 0
        ids = template.prompt_ids(bpe(), [Message("user", "the cat?")])
        assert visitor.write("the cat?") == greedy(model, bpe(), ids, 12).lstrip()


@in_browser
def test_stop_ends_a_text_and_the_next_begins(browser: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "mine", CHARACTERS, embed_dim=256, num_layers=4, max_seq_len=5000)  # never ends by itself
    with Visitor(browser, written(tmp_path / "mine")) as visitor:
        visitor.settings(20_000)
        visitor.tab.locator("#text").fill("the cat")
        visitor.tab.keyboard.press("Shift+Enter")
        visitor.tab.locator(".turn.model .token").nth(3).wait_for()
        visitor.tab.locator("#stop").click()
        visitor.tab.get_by_text("tokens/s, stopped").wait_for()
        visitor.tab.get_by_label("Length").fill("2")
        visitor.write("the dog")
        assert visitor.tab.locator(".turn.model .token").count() == 2


@in_browser
def test_texts_are_no_html(browser: Any, tmp_path: Path) -> None:
    """The name, the labels, what is typed, and what a model writes: here it repeats its only tokens."""
    tokenizer = CharacterTokenizer(sorted(set(ATTACK)))
    write_model(tmp_path / "mine", tokenizer)
    page = tmp_path / f"{ATTACK.replace('/', '')}.html"
    assert run_script(export_page.main, tmp_path / "mine", page).code == 0
    with Visitor(browser, page) as visitor:
        assert visitor.tab.title() == f"{page.stem}: a language model"
        visitor.write(ATTACK)
        assert (
            visitor.tab.locator(".turn.prompt").text_content() == ATTACK
            and visitor.tab.title() == f"{page.stem}: a language model"
        )
        assert visitor.tab.locator("img").count() == 0


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_and_fits_a_phone(browser: Any, tmp_path: Path, scheme: str) -> None:
    write_model(tmp_path / "mine", chat=ChatTemplate(), max_seq_len=600)
    options = {"color_scheme": scheme, "viewport": {"width": 390, "height": 800}}
    with Visitor(browser, written(tmp_path / "mine"), **options) as visitor:
        visitor.settings(60, 1.0)
        visitor.write("x" * 400)
        visitor.tab.locator(".turn.model .token:visible").first.click()  # some tokens are half a character
        assert visitor.tab.evaluate("document.documentElement.scrollWidth") == 390
        names = visitor.tab.evaluate(
            "[...document.querySelectorAll('input, textarea')].map((each) => each.labels.length)"
        )
        assert names and all(names)

"""The server as a process, asked by OpenAI's own client, and by sockets where a client would not do such a thing."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import generate
from common.chat import ChatTemplate, Message
from generation.completion import generate as complete
from generation.sampling import Sampling
from serving.server import checked_origin
from tests.helpers import without_packages
from tests.models import CHARACTERS, random_model, write_model
from tests.serving.servers import Server, started
from tools import serve

if TYPE_CHECKING:
    from model import TransformerLanguageModel
    from serving.models import Served
    from tokenizer_bpe import BPETokenizer

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.extras("fastapi", "uvicorn", "openai")
KEY = "secretSECRETsecret"
ENDLESS = 1_000_000  # tokens, which take minutes; a model of characters never ends by itself
SECONDS = 60.0  # that a request has of the strict server
SOON = SECONDS - 5  # what takes less has not waited for another request's time to be up
CONTEXT = 128  # tokens that the talker reads
QUESTION = [{"role": "user", "content": "What is it?"}]
GREEDY = {"temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on conversations, and a model of characters that knows of none."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "runs" / "talker" / "checkpoints" / "step_00000007", chat=ChatTemplate(), max_seq_len=CONTEXT)
    write_model(folder / "letters", CHARACTERS)
    return folder


@pytest.fixture(scope="module")
def servers(models: Path) -> Iterator[tuple[Server, Server]]:
    """Both at a time, for they start in seconds."""
    strict = ("--host", "0.0.0.0", "--queue", "1", "--timeout", str(SECONDS), "--max_tokens", str(ENDLESS))
    origins = ("--cors", "http://Pages.example:80/", "--cors", "app://notes")  # as people write them
    with (
        started(models / "talks", str(models / "runs" / "talker")) as talker,
        started(models / "spells", str(models / "letters"), *strict, *origins, key=KEY, end=signal.SIGINT) as letters,
    ):
        yield talker, letters


@pytest.fixture(scope="module")
def talker(servers: tuple[Server, Server]) -> Server:
    return servers[0]


@pytest.fixture(scope="module")
def letters(servers: tuple[Server, Server]) -> Server:
    """For other machines too, with a key, room for one that waits, and little time."""
    return servers[1]


def streamed(parts: Any) -> tuple[str, str | None]:
    """The text of a stream, and why it ended."""
    text, reason = "", None
    for choice in (choice for part in parts for choice in part.choices):
        assert reason is None
        text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
        reason = choice.finish_reason
    return text, reason


# What is answered


def test_the_examples_that_it_prints_run(talker: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert talker.port and talker.printed.startswith("Model      talker: ")
    (example,) = re.findall(r"^ {4}from openai.*?(?=\n\nIn a shell)", talker.printed, flags=re.DOTALL | re.MULTILINE)
    exec("\n".join(line.strip() for line in example.splitlines()), {})  # noqa: S102
    assert capsys.readouterr().out.endswith("\n")  # after a text that may end before it begins
    (command,) = re.findall(r"^ {4}(curl .*)", talker.printed, flags=re.MULTILINE)
    if shutil.which("curl"):
        answer = subprocess.run(["sh", "-c", f"{command} -s"], capture_output=True, check=True).stdout
        assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"


def test_models_are_listed(talker: Server) -> None:
    assert [model.id for model in talker.client().models.list()] == ["talker"]
    assert talker.client().models.retrieve("talker").object == "model"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has 'talker'"):
        talker.client().models.retrieve("other")


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 9, "repetition_penalty": 2}])
def test_completions_are_those_of_generate(
    talker: Server, models: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole and streamed; what a request leaves out is what generate.py has."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    words = ["--checkpoint", str(models / "runs"), "--prompt", "the cat", "--max_new_tokens", "30"]
    assert generate.main([*words, "--raw", "--json", *flags]) == 0
    expected = json.loads(capsys.readouterr().out)
    extra = {name: options[name] for name in options if name in ("top_k", "repetition_penalty")}
    usual = {name: value for name, value in options.items() if name not in extra}
    request = {"model": "talker", "prompt": "the cat", "max_tokens": 30, "extra_body": extra, **usual}
    whole = talker.client().completions.create(**request)
    assert whole.choices[0].text == expected["completion"] and whole.usage.completion_tokens == expected["tokens"]
    assert whole.object == "text_completion" and whole.model == "talker"
    assert streamed(talker.client().completions.create(**request, stream=True)) == (expected["completion"], "length")
    echo = talker.client().completions.create(**request, echo=True)
    assert echo.choices[0].text == "the cat" + expected["completion"]
    assert streamed(talker.client().completions.create(**request, echo=True, stream=True))[0] == echo.choices[0].text


def test_chat_answers_as_generate_does(talker: Server, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--checkpoint", str(models / "runs"), "--prompt", "What is it?", "--max_new_tokens", "30"]
    assert generate.main([*words, "--temperature", "0", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["completion"]
    answer = talker.client().chat.completions.create(model="talker", messages=QUESTION, **GREEDY)
    assert answer.choices[0].message.content.strip() == expected


def test_chat_is_the_template_and_what_follows(talker: Server, models: Path) -> None:
    model, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    turns = [{"role": "developer", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "A cat."}]
    parts = [{"type": "text", "text": "And"}, {"type": "text", "text": "that?"}]
    turns.append({"role": "user", "content": parts})
    read = [
        *(Message("system", "Be brief."), Message("user", "What is it?")),
        *(Message("assistant", "A cat."), Message("user", "And\nthat?")),
    ]
    ids = ChatTemplate().prompt_ids(tokenizer, read)
    (expected,) = complete(model, tokenizer, [ids], Sampling(max_new_tokens=30, temperature=0))
    request = {"model": "talker", "messages": turns, "temperature": 0, "max_completion_tokens": 30}
    whole = talker.client().chat.completions.create(**request)
    assert whole.choices[0].message.content == expected.text.lstrip()
    assert whole.choices[0].finish_reason == ("stop" if expected.ended else "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), expected.tokens)
    assert whole.usage.total_tokens == len(ids) + expected.tokens
    stream = talker.client().chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    assert streamed(parts) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].usage == whole.usage
    # An answer may be sent back as it came.
    again = [*turns, whole.choices[0].message, *QUESTION]
    assert talker.client().chat.completions.create(model="talker", messages=again, max_tokens=1).choices


def test_penalties_are_those_of_generation(talker: Server, models: Path) -> None:
    model, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    texts = set()
    for penalties in ({}, {"frequency_penalty": 2.0}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}):
        sampling = Sampling(max_new_tokens=60, temperature=0, **penalties)
        (expected,) = complete(model, tokenizer, ["the cat"], sampling)
        request = {"model": "talker", "temperature": 0, "max_tokens": 60, **penalties}
        assert talker.client().completions.create(prompt="the cat", **request).choices[0].text == expected.text
        assert talker.client().chat.completions.create(messages=QUESTION, **request).choices
        texts.add(expected.text)
    assert len(texts) == 3


def test_a_stop_string_ends_a_text(talker: Server) -> None:
    request = {"model": "talker", "prompt": "the cat", **GREEDY}
    free = talker.client().completions.create(**request).choices[0].text
    stop = free[10:13]
    for words in (stop, ["never", stop]):
        choice = talker.client().completions.create(**request, stop=words).choices[0]
        assert (choice.text, choice.finish_reason) == (free[: free.index(stop)], "stop")
    assert streamed(talker.client().completions.create(**request, stop=stop, stream=True)) == (choice.text, "stop")


def test_each_of_several_texts_has_the_seed_after_the_last(talker: Server) -> None:
    create = talker.client().completions.create
    alone = [create(model="talker", prompt=prompt, seed=seed, max_tokens=20) for seed, prompt in enumerate("aabb", 7)]
    together = create(model="talker", prompt=["a", "b"], n=2, seed=7, max_tokens=20)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens + alone[2].usage.prompt_tokens
    assert len({create(model="talker", prompt="a", max_tokens=20).choices[0].text for _ in range(3)}) > 1


def test_a_prompt_may_be_token_ids(talker: Server, models: Path) -> None:
    """One, or several; a special token is its id alone, and its name where the prompt is echoed."""
    _, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    create, texts = talker.client().completions.create, ["the cat", "a hill"]
    ids = [tokenizer.encode(text).tolist() for text in texts]
    request = {"model": "talker", "echo": True, **GREEDY}
    assert create(prompt=ids[0], **request).choices == create(prompt=texts[0], **request).choices
    together = create(prompt=ids, **request)
    assert together.choices == create(prompt=texts, **request).choices
    assert together.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    begun = create(prompt=[tokenizer.end_of_text_id, *ids[0]], **request).choices[0].text
    assert begun.startswith("<|endoftext|>the cat")


def test_many_clients_at_once_get_each_their_own(talker: Server) -> None:
    client = talker.client()

    def ask(seed: int) -> str:
        request = {"model": "talker", "prompt": "the", "seed": seed, "max_tokens": 20}
        if seed % 2:
            return streamed(client.completions.create(**request, stream=True))[0]
        return client.completions.create(**request).choices[0].text

    with ThreadPoolExecutor(20) as threads:
        at_once = list(threads.map(ask, range(20)))
    assert at_once == [ask(seed) for seed in range(20)] and len(set(at_once)) > 10


def test_the_oldest_turns_are_forgotten_where_they_have_no_room(talker: Server) -> None:
    long = "the cat sat on a mat. " * 15_000
    forgotten = [*QUESTION, {"role": "assistant", "content": long}] * 2 + QUESTION
    answer = talker.client().chat.completions.create(model="talker", messages=forgotten, **GREEDY)
    assert answer == talker.client().chat.completions.create(model="talker", messages=QUESTION, **GREEDY).model_copy(
        update={"id": answer.id, "created": answer.created}
    )


# How likely its tokens were


@pytest.fixture(scope="module")
def talking(models: Path) -> tuple[TransformerLanguageModel, BPETokenizer]:
    """The talker, in this process."""
    return generate.load_model(models / "runs" / "talker", "cpu")  # type: ignore[return-value]


def token_name(tokenizer: BPETokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def check_logprobs(told: Any, asked: str, text: str, before: list[int], count: int, talking: Any) -> list[int]:
    """The ids that are told of; they make up `text`, are likely as the model says after the ids `before`, and stand in
    what was `asked` and the text where it is said."""
    model, tokenizer = talking
    names = {token_name(tokenizer, i): i for i in range(tokenizer.vocab_size)}
    ids = [names[token] for token in told.tokens]
    assert tokenizer.decoder().push(ids) == text
    assert len(ids) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    for last, token, offset in zip(["", *told.tokens], told.tokens, told.text_offset, strict=False):
        if not (last + token).count("bytes:"):  # of a whole character, after one
            assert (asked + text)[offset : offset + len(token)] == token
    with torch.no_grad():
        rows = model(torch.tensor([before + ids]))[0].log_softmax(dim=-1)  # (T, V)
    said = list(zip(ids, told.token_logprobs, told.top_logprobs, strict=True))[0 if before else 1 :]
    for (id, logprob, top), row in zip(said, rows[-len(said) - 1 : -1], strict=True):
        assert logprob == pytest.approx(float(row[id]), abs=1e-4)
        assert top == {name: pytest.approx(float(row[names[name]]), abs=1e-4) for name in top}
        row[tokenizer.unused_ids] = -torch.inf
        assert {names[name] for name in top} == {*row.topk(count).indices.tolist(), id}
    return ids


def joined(parts: list[Any]) -> dict[str, Any]:
    """The log-probabilities of a stream, as one."""
    told = [choice.logprobs.to_dict() for part in parts for choice in part.choices]
    return {name: [x for each in told for x in each[name]] for name in told[0]}


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_of_a_completion_are_the_models(talker: Server, talking: Any, count: int) -> None:
    """Whatever the sampling; whole, streamed, cut by a stop string and after a prompt that is echoed."""
    create, ids = talker.client().completions.create, talking[1].encode("the cat").tolist()
    request = {"model": "talker", "prompt": "the cat", "seed": 5, "max_tokens": 40, "logprobs": count}
    request["presence_penalty"] = 1.5
    (whole,) = create(**request).choices
    made = check_logprobs(whole.logprobs, "the cat", whole.text, ids, count, talking)
    assert len(made) == 40 and any(name.startswith("bytes:") for name in whole.logprobs.tokens)
    parts = list(create(**request, stream=True))
    assert (streamed(parts)[0], joined(parts)) == (whole.text, whole.logprobs.to_dict())

    (echoed,) = create(**request, echo=True).choices
    told = echoed.logprobs
    assert check_logprobs(told, "", "the cat" + whole.text, [], count, talking) == ids + made
    assert (told.token_logprobs[0], told.top_logprobs[0], told.text_offset[0]) == (None, None, 0)
    assert told.text_offset[len(ids) :] == whole.logprobs.text_offset
    parts = list(create(**request, echo=True, stream=True))
    assert (streamed(parts)[0], joined(parts)) == (echoed.text, told.to_dict())

    stop = whole.text[20:23]
    (cut,) = create(**request, stop=stop).choices
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.logprobs.tokens
    assert cut.logprobs.tokens == [
        token
        for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True)
        if offset < len("the cat" + cut.text)
    ]
    parts = list(create(**request, stop=stop, stream=True))
    assert (streamed(parts)[0], joined(parts)) == (cut.text, cut.logprobs.to_dict())


def test_an_echoed_prompt_is_scored_as_generate_scores_it(
    talker: Server, models: Path, talking: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several at a time, as evaluation programs send them: ids after an end-of-text token, and a token more or none."""
    texts = ["the cat sat on a mat.", "a hill \U0001f600 is", "on"]
    scores = []
    for text in texts:
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        words = ["--score", str(tmp_path / "text.txt"), "--checkpoint", str(models / "runs"), "--json"]
        assert generate.main(words) == 0
        scores.append(json.loads(capsys.readouterr().out))
    model, tokenizer = talking
    prompts = [[tokenizer.end_of_text_id, *tokenizer.encode(text).tolist()] for text in texts]
    for more in (0, 1):
        request = {"model": "talker", "prompt": prompts, "max_tokens": more, "echo": True, "logprobs": 1}
        answer = talker.client().completions.create(**request, temperature=0, seed=1234)
        assert answer.usage.completion_tokens == more * len(texts)
        for choice, text, prompt, score in zip(answer.choices, texts, prompts, scores, strict=True):
            told = choice.logprobs
            logprobs = told.token_logprobs[1 : len(prompt)]
            assert len(logprobs) == score["tokens"] and len(told.tokens) == len(prompt) + more
            assert -sum(logprobs) == pytest.approx(score["loss"] * score["tokens"], abs=1e-3)
            assert choice.text.startswith("<|endoftext|>" + text) and choice.finish_reason == "length"
            is_greedy = [one == max(top.values()) for one, top in zip(logprobs, told.top_logprobs[1:], strict=False)]
            with torch.no_grad():
                likeliest = model(torch.tensor([prompt]))[0].argmax(dim=-1)
            assert is_greedy == (likeliest[:-1] == torch.tensor(prompt[1:])).tolist()


def test_a_prompt_of_nothing_has_no_tokens(talker: Server) -> None:
    request = {"model": "talker", "prompt": "", "echo": True, "logprobs": 2, "seed": 3}
    (choice,) = talker.client().completions.create(**request, max_tokens=0).choices
    assert (choice.text, choice.logprobs.tokens, choice.logprobs.token_logprobs) == ("", [], [])
    (choice,) = talker.client().completions.create(**request, max_tokens=1).choices
    assert len(choice.logprobs.tokens) == 1 and choice.logprobs.token_logprobs[0] < 0


@pytest.mark.parametrize("n", [1, 2])
def test_logprobs_in_a_conversation(talker: Server, talking: Any, n: int) -> None:
    model, tokenizer = talking
    prompt = ChatTemplate().prompt_ids(tokenizer, [Message("user", "What is it?")])
    request = {"model": "talker", "messages": QUESTION, "seed": 3, "max_tokens": 20, "n": n, "logprobs": True}
    whole = talker.client().chat.completions.create(**request, top_logprobs=4).choices
    for choice in whole:
        content = choice.logprobs.content
        data = bytes(byte for said in content for byte in said.bytes)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert decoder.decode(data).lstrip() == choice.message.content
        ids = [next(i for i in range(3, 300) if tokenizer.token_bytes(i) == bytes(said.bytes)) for said in content]
        with torch.no_grad():
            rows = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        for said, id, row in zip(content, ids, rows, strict=True):
            assert "bytes:" + said.token == token_name(tokenizer, id) or said.token == token_name(tokenizer, id)
            assert said.logprob == pytest.approx(float(row[id]), abs=1e-4)
            row[tokenizer.unused_ids] = -torch.inf
            expected = row.topk(4)
            assert [bytes(top.bytes) for top in said.top_logprobs] == [*map(tokenizer.token_bytes, expected.indices)]
            assert [top.logprob for top in said.top_logprobs] == pytest.approx(expected.values.tolist(), abs=1e-4)
    parts = list(talker.client().chat.completions.create(**request, top_logprobs=4, stream=True))
    for i, choice in enumerate(whole):
        told = [each for part in parts for each in part.choices if each.index == i]
        assert [said for each in told for said in each.logprobs.content] == choice.logprobs.content
        assert "".join(each.delta.content or "" for each in told) == choice.message.content
    plain = talker.client().chat.completions.create(**request).choices
    assert [choice.message for choice in plain] == [choice.message for choice in whole]
    assert not any(said.top_logprobs for choice in plain for said in choice.logprobs.content)
    assert talker.client().chat.completions.create(**request | {"logprobs": False}).choices[0].logprobs is None


def test_an_answer_that_is_begun_goes_on(talker: Server, models: Path) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "the cat"}]
    answer = talker.client().chat.completions.create(model="talker", messages=begun, **GREEDY)
    model, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    template = ChatTemplate()
    ids = [*template.prompt_ids(tokenizer, [Message("user", "What is it?")]), *tokenizer.encode(" the cat").tolist()]
    (expected,) = complete(model, tokenizer, [ids], Sampling(max_new_tokens=30, temperature=0))
    assert answer.choices[0].message.content == expected.text.lstrip()


def test_a_bias_makes_a_token_certain_or_impossible(talker: Server, models: Path) -> None:
    from serving.openai_answer import token_name

    _, _, plain = talker.ask({"prompt": "the", "temperature": 0, "max_tokens": 1, "logprobs": 5})
    ((first, _), (second, _)) = sorted(
        plain["choices"][0]["logprobs"]["top_logprobs"][0].items(), key=lambda item: -item[1]
    )[:2]
    _, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    ids = {token_name(tokenizer.token_bytes(i), "bytes:"): i for i in range(300)}
    for bias, expected in (({str(ids[first]): -100}, second), ({str(ids[second]): 100}, second)):
        _, _, answer = talker.ask(
            {"prompt": "the", "temperature": 0, "max_tokens": 1, "logprobs": 0, "logit_bias": bias}
        )
        assert answer["choices"][0]["logprobs"]["tokens"] == [expected]


def test_more_tokens_than_the_server_gives_are_cut(models: Path, served: Served) -> None:
    status, answer = ask_app(served._replace(max_tokens=7), {"max_tokens": 10**6})
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 7


def test_connections_that_send_slowly_take_no_place(letters: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(letters.send({}, length=1_000))
        assert letters.client().completions.create(model="letters", prompt="a", max_tokens=3).choices


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        ("completions", b"{", 400, None, "is not JSON"),
        ("completions", b"[" * 100_000, 400, None, "is not JSON"),
        ("completions", b"\xff", 400, None, "is not JSON"),
        ("completions", [], 400, None, "no JSON object"),
        ("completions", {"model": "gpt-4"}, 404, "model", "'gpt-4' does not exist; this server has 'talker'"),
        ("completions", {"model": 1}, 400, "model", "model is 1"),
        ("completions", {"prompt": 1}, 400, "prompt", "prompt is 1: a text, a list of token ids, or"),
        ("completions", {"prompt": [1, True]}, 400, "prompt", "a text, a list of token ids, or"),
        ("completions", {"prompt": [[1], []]}, 400, "prompt", "a text, a list of token ids, or"),
        ("completions", {"prompt": [1, 300]}, 400, "prompt", "the token id 300; talker has 0 to 299"),
        ("completions", {"prompt": [[-1]]}, 400, "prompt", "the token id -1; talker has 0 to 299"),
        ("completions", {"prompt": [1] * 129}, 400, "prompt", "A prompt makes 129 tokens"),
        ("completions", {"prompt": []}, 400, "prompt", "0 prompts"),
        ("completions", {"prompt": ["a"] * 20, "n": 2}, 400, "prompt", "40 texts; 1 to 32"),
        ("completions", {"n": 33}, 400, "n", "n is 33: Input should be less than or equal to 32"),
        ("completions", {"max_tokens": "9"}, 400, "max_tokens", 'max_tokens is "9"'),
        ("completions", {"max_tokens": -1}, 400, "max_tokens", "max_tokens is -1"),
        ("completions", {"max_tokens": True}, 400, "max_tokens", "max_tokens is true"),
        ("completions", {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", "give one"),
        ("completions", {"temperature": "hot"}, 400, "temperature", "temperature is"),
        ("completions", {"temperature": -1}, 400, "temperature", "temperature is -1.0; allowed: at least 0"),
        ("completions", b'{"temperature": NaN}', 400, "temperature", "is NaN"),
        ("completions", b'{"temperature": 1' + b"0" * 400 + b"}", 400, "temperature", "temperature is"),
        ("completions", {"top_p": 2}, 400, "top_p", "at most 1"),
        ("completions", {"seed": 1.5}, 400, "seed", "seed is 1.5"),
        ("completions", {"stop": list("abcde")}, 400, "stop", "up to 4 texts"),
        ("completions", {"stop": ""}, 400, "stop", "up to 4 texts of 1 to 1,000"),
        ("completions", {"stream": 1}, 400, "stream", "stream is 1"),
        ("completions", {"stream_options": {}}, 400, "stream_options", '"stream": true'),
        ("completions", {"logprobs": 6}, 400, "logprobs", "logprobs is 6"),
        ("completions", {"logprobs": True}, 400, "logprobs", "logprobs is true"),
        ("completions", {"top_logprobs": 2}, 400, "top_logprobs", "no parameter"),
        ("completions", {"logit_bias": {"900": 1}}, 400, "logit_bias", "the token id 900; talker has 0 to 299"),
        ("completions", {"logit_bias": {"a": 1}}, 400, "logit_bias", "the token id"),
        ("completions", {"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "the token id"),
        ("completions", {"best_of": 2}, 400, "best_of", "best_of is 2"),
        ("completions", {"min_p": 2}, 400, "min_p", "min_p is 2.0"),
        ("completions", {"presence_penalty": 3}, 400, "presence_penalty", "is 3.0; allowed: at least -2 and"),
        ("completions", {"temprature": 1}, 400, "temprature", "'temprature'. Did you mean temperature?"),
        ("chat/completions", {}, 400, "messages", "messages is missing"),
        ("chat/completions", {"messages": []}, 400, "messages", "it has no turns"),
        ("chat/completions", {"messages": QUESTION * 2}, 400, "messages", "turn 2 is from the user"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "role 'tool'"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "is missing"),
        ("chat/completions", {"messages": [{"role": 1, "content": "a"}]}, 400, "messages[0].role", "is 1"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            400,
            "messages[0].content",
            '{"type": "text", "text": ...} is needed',
        ),
        ("chat/completions", {"messages": QUESTION, "tools": [{}]}, 400, "tools", "does not support"),
        ("chat/completions", {"messages": QUESTION, "logprobs": 1}, 400, "logprobs", "logprobs is 1"),
        ("chat/completions", {"messages": QUESTION, "top_logprobs": 21}, 400, "top_logprobs", "equal to 20"),
        ("chat/completions", {"messages": QUESTION, "top_logprobs": 1}, 400, "top_logprobs", 'needs "logprobs": true'),
        ("chat/completions", {"messages": QUESTION, "max_tokens": 0}, 400, "max_tokens", "needs 1 or more"),
        ("chat/completions", {"messages": QUESTION, "response_format": {"type": "json_object"}}, 400, *[
            "response_format", "does not support"
        ]),
        ("chat/completions", {"messages": QUESTION, "echo": True}, 400, "echo", "no parameter"),
        ("chat/completions", {"messages": [QUESTION[0] | {"nam": "Al"}]}, 400, "messages[0].nam", "no parameter"),
        ("nothing", {}, 404, None, "There is no POST /v1/nothing"),
        ("models", {}, 404, None, "There is no POST /v1/models"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(talker: Server, path: str, body: Any, status: int, param: str | None, said: str) -> None:
    answered, _, answer = talker.ask(body, path)
    assert (answered, answer["error"]["param"]) == (status, param), answer
    assert answer["error"]["type"] == "invalid_request_error" and said in answer["error"]["message"]


def test_a_prompt_longer_than_the_context_is_refused(talker: Server, models: Path) -> None:
    """It would see the end alone; one that fills the context is answered."""
    create, unit = talker.client().completions.create, " a b"
    _, tokenizer = generate.load_model(models / "runs" / "talker", "cpu")
    fitting = next(unit * n for n in range(128, 0, -1) if len(tokenizer.encode(unit * n)) <= CONTEXT)
    tokens = len(tokenizer.encode(fitting + unit))
    assert create(model="talker", prompt=fitting, max_tokens=3).choices[0].finish_reason
    for prompt in (fitting + unit, ["the cat", fitting + unit]):
        with pytest.raises(
            openai.BadRequestError, match=f"A prompt makes {tokens} tokens, and talker reads {CONTEXT}\\."
        ) as error:
            create(model="talker", prompt=prompt, max_tokens=3)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="The last question makes"):
        talker.client().chat.completions.create(model="talker", messages=[QUESTION[0] | {"content": fitting * 2}])


def test_what_changes_nothing_is_accepted(talker: Server) -> None:
    plain = talker.client().chat.completions.create(model="talker", messages=QUESTION, **GREEDY)
    known = {"user": "me", "metadata": {}, "store": False, "n": 1, "logprobs": False, "frequency_penalty": 0}
    neutral = {"presence_penalty": 0.0, "logit_bias": {}, "tools": [], "response_format": {"type": "text"}}
    same = talker.client().chat.completions.create(model="talker", messages=QUESTION, **GREEDY, **known, **neutral)
    assert same.choices == plain.choices
    named = [QUESTION[0] | {"name": "Al"}]
    assert talker.client().chat.completions.create(model="talker", messages=named, **GREEDY).choices == plain.choices
    assert talker.ask({"prompt": "the", "n": 2, "best_of": 2, "min_p": 0.5, "max_tokens": 2})[0] == 200
    assert talker.ask({"prompt": "\ud800 half a character", "max_tokens": 1, "echo": True})[0] == 200
    assert talker.ask({"top_k": 10**30, "seed": 10**30, "max_tokens": 2, "stop": None})[0] == 200


def test_requests_that_are_too_large_or_not_json(talker: Server) -> None:
    status, _, answer = talker.ask({"prompt": "x" * 1_000_001})
    assert status == 413 and "larger than 1,000,000 bytes" in answer["error"]["message"]
    with pytest.raises(openai.APIStatusError, match="larger than"):
        talker.client().completions.create(model="talker", prompt="x" * 5_000_000)
    status, _, answer = talker.ask({}, **{"Content-Type": "text/plain"})
    assert status == 415 and "Content-Type: application/json" in answer["error"]["message"]


def test_only_names_of_this_machine_are_answered_without_a_key(talker: Server, letters: Server) -> None:
    for host in ("localhost:8000", "localhost", "127.0.0.1", "[::1]:1", "[::1]"):
        assert talker.ask(b"", "models", "GET", Host=host)[0] == 200
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil", ""):
        status, _, answer = talker.ask(b"", "models", "GET", Host=host)
        assert status == 400 and f"not {host!r}: without a key" in answer["error"]["message"]
    assert letters.ask(b"", "models", "GET", Host="my.server.example")[0] == 200
    assert "access-control-allow-origin" not in talker.ask(b"", "models", "GET", Origin="http://a.example")[1]


def test_pages_from_an_origin_that_is_named_may_ask(letters: Server) -> None:
    """A browser first asks whether they may, without the key; a refusal is for the page to read, too."""
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    for origin, may in (("http://pages.example", True), ("app://notes", True), ("http://evil.example", False)):
        status, headers, _ = letters.ask(b"", "completions", "OPTIONS", Origin=origin, Authorization="", **wanted)
        assert status == (200 if may else 400)
        assert (headers["access-control-allow-origin"] == origin) == may
        assert not may or "x-stainless-os" in headers["access-control-allow-headers"]
        for key, status in ((KEY, 200), ("wrong", 401)):
            answered, headers, _ = letters.ask({}, Origin=origin, Authorization=f"Bearer {key}")
            assert (answered, headers["access-control-allow-origin"]) == (status, origin if may else None)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("*", "*"),
        ("https://A.example:443", "https://a.example"),
        ("http://localhost:8080", "http://localhost:8080"),
    ],
)
def test_an_origin_is_written_as_browsers_write_it(given: str, read: str) -> None:
    assert checked_origin(given) == read


def test_its_health_is_told_without_a_key(talker: Server, letters: Server) -> None:
    for server in (talker, letters):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})


def test_a_key_is_needed_where_there_is_one(letters: Server) -> None:
    assert letters.port and "for whoever has the key; the connection is not encrypted" in letters.printed
    (other,) = re.findall(rf"^Network    http://([\w.-]+):{letters.port}/,", letters.printed, flags=re.MULTILINE)
    assert other not in ("127.0.0.1", "localhost", "0.0.0.0")
    assert letters.client().models.list().data[0].id == "letters"
    for wrong in ("wrong", KEY[:-1], KEY + "x", "ключ"):
        status, headers, answer = letters.ask(b"", "models", "GET", Authorization=f"Bearer {wrong}".encode())
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer"
    assert letters.ask({}, Authorization=KEY)[0] == 401 and letters.ask({}, "nothing", Authorization="")[0] == 401
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        letters.client(api_key="wrong").completions.create(model="letters", prompt="a")


def test_a_model_without_a_template_says_what_to_do(letters: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tokenize_local_bpe\.py --format chat\), or use /v1/completions"):
        letters.client().chat.completions.create(model="letters", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match=r"1 character is not in the vocabulary: 'X'"):
        letters.client().completions.create(model="letters", prompt="the X")


# One at a time


def endless(server: Server) -> Any:
    """A stream that has begun."""
    stream = server.client().completions.create(model="letters", prompt="a", max_tokens=ENDLESS, stream=True)
    assert next(iter(stream)).choices
    return stream


def wait_until_full(server: Server) -> tuple[int, Any, Any]:
    """What another request is told then. Whoever is on the way comes first: asking takes a place, too."""
    deadline = time.monotonic() + SOON
    time.sleep(0.5)
    while (answer := server.ask({"prompt": "X"}))[0] != 429:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return answer


def test_one_is_answered_one_waits_the_third_is_refused(letters: Server) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread, endless(letters) as stream:
        patient = letters.client(max_retries=5)  # it may come while asking whether it is there takes its place
        waiting = thread.submit(patient.completions.create, model="letters", prompt="a", max_tokens=3)
        _, headers, answer = wait_until_full(letters)
        assert headers["retry-after"] == "1" and answer["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError, match="Too many requests are waiting"):
            letters.client().completions.create(model="letters", prompt="a")
        assert not waiting.done()
        stream.close()  # which ends the generation, too
        assert waiting.result().usage.completion_tokens == 3
    assert time.monotonic() - began < SOON


def test_a_client_that_goes_away_makes_room(letters: Server) -> None:
    """Whether its text is being made or has to wait, and whatever it was to be sent at once or as it is made."""
    began = time.monotonic()
    whole = letters.send({"max_tokens": ENDLESS})
    waiting = letters.send({"max_tokens": ENDLESS})
    wait_until_full(letters)
    waiting.close()
    while letters.ask({"prompt": "X"})[0] == 429:
        time.sleep(0.02)
    whole.close()
    assert letters.client().completions.create(model="letters", prompt="a", max_tokens=3).choices
    assert time.monotonic() - began < SOON


def test_a_signal_ends_what_is_under_way(models: Path, tmp_path: Path) -> None:
    """A stream ends in form, who waits is told, and nobody holds it up: not an idle connection, not half a request."""
    from serving.serve import SHUTDOWN_SECONDS

    with (
        started(tmp_path, str(models / "letters"), "--max_tokens", str(ENDLESS), "--queue", "1") as server,
        ThreadPoolExecutor(1) as thread,
        endless(server) as stream,
        server.send({}, length=1_000),
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        waiting = thread.submit(server.ask, {"max_tokens": 3})
        wait_until_full(server)
        server.process.send_signal(signal.SIGTERM)
        assert streamed(stream)[1] == "length"
        status, headers, answer = waiting.result()
        assert status == 503 and "shutting down" in answer["error"]["message"] and headers["retry-after"]
        assert server.process.wait(SHUTDOWN_SECONDS + 2) == 0


def ask_app(
    served: Served, body: dict[str, Any], seconds: float = 60, is_taken: bool = False, is_read: bool = True
) -> tuple[int, str]:
    """(status, answer) of the application in this process. `is_taken`: somebody else's text is being made; `is_read`:
    the client reads its answer."""
    from serving.app import Turns, make_app
    from serving.server import Settings

    sent: list[dict[str, Any]] = []
    came = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> dict[str, Any]:
        if message := next(came, None):
            return message
        return await asyncio.Future()  # it stays, and says no more

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if not is_read and message.get("body"):
            await asyncio.Future()

    async def ask() -> None:
        turns = Turns(served, 1, seconds)
        if is_taken:
            await turns.turn.acquire()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await make_app(turns, Settings(), "", "127.0.0.1")(scope, receive, send)
        assert turns.places == 2

    asyncio.run(ask())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


def test_a_client_that_does_not_read_its_stream_loses_its_turn(served: Served) -> None:
    began = time.monotonic()
    assert ask_app(served, {"max_tokens": ENDLESS, "stream": True}, seconds=0.5, is_read=False)[0] == 200
    assert 0.5 <= time.monotonic() - began < SOON


@pytest.fixture
def served() -> Served:
    from serving.models import Served

    return Served("letters", random_model(CHARACTERS.vocab_size), CHARACTERS, None, ENDLESS)


@pytest.mark.parametrize("stream", [False, True])
def test_when_its_time_is_up_a_text_ends_where_it_is(served: Served, stream: bool) -> None:
    began = time.monotonic()
    status, answer = ask_app(served, {"stream": stream, "max_tokens": ENDLESS}, seconds=1.0)
    assert time.monotonic() - began > 1.0
    reasons = set(re.findall(r'"finish_reason": ?(\w+|"\w+")', answer))
    assert status == 200 and reasons == {'"length"', *(["null"] if stream else [])}


def test_whose_turn_does_not_come_in_time_is_told(served: Served) -> None:
    status, answer = ask_app(served, {}, seconds=0.1, is_taken=True)
    assert status == 503 and "waited 0.1 s for its turn" in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug")])
def test_what_fails_while_a_text_is_made_is_told(
    served: Served, stream: bool, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the status, or at the end of a stream that has begun; a bug is shown to whoever runs the server."""
    calls = iter(range(1_000))

    def fail(*_: Any) -> None:
        if next(calls) == 500:
            raise error

    served.model.ln_f.register_forward_pre_hook(fail)
    status, answer = ask_app(served, {"stream": stream, "max_tokens": 999})
    assert status == (200 if stream else 500)
    is_bug = isinstance(error, RuntimeError)
    assert ("The server failed: RuntimeError" if is_bug else "do not fit in memory") in answer
    assert '"type": "server_error"' in answer and answer.endswith("data: [DONE]\n\n") == stream
    assert ("RuntimeError: a bug" in capsys.readouterr().err) == is_bug
    assert ask_app(served, {"max_tokens": 5})[0] == 200, "the next one is answered"


# What keeps it from starting


def test_what_is_wrong_with_a_command_is_said(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SERVE_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, said in (
            (["--port", str(port)], f"Port {port} is in use by another program; choose another with --port."),
            (["--host", "no.such.host.invalid"], "--host no.such.host.invalid is no address"),
            (["--port", "70000", "--queue", "-1"], "--queue is -1; allowed: at least 1"),
            (["--timeout", "nan"], "--timeout is NaN; a number"),
            (["--max_tokens", "0"], "--max_tokens is 0; allowed: at least 1"),
            (["--cors", "localhost:3000"], "--cors is localhost:3000; the beginning of a page's address is needed"),
            (["--cors", "http://a.example/page"], "--cors is http://a.example/page; the beginning"),
            (["--prot", "1"], "unknown flag --prot. Did you mean --port?"),
        ):
            assert serve.main([str(models / "letters"), *words]) == 2
            assert said in capsys.readouterr().err
    monkeypatch.setenv("SERVE_API_KEY", "a key with spaces")
    assert serve.main([]) == 2 and "SERVE_API_KEY has spaces" in capsys.readouterr().err
    with without_packages("fastapi", "uvicorn"):
        assert serve.main([]) == 2
    assert "This needs fastapi and uvicorn: pip install -r requirements-extras.txt" in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(tmp_path / "none"), "--port", "0"]) == 4
    assert f"There is no trained model in {tmp_path}/none/." in capsys.readouterr().err


def test_a_model_goes_by_the_name_of_its_run() -> None:
    from serving.models import run_folder

    for path in ("a/run", "a/run/best", "a/run/checkpoints/step_00000012"):
        assert run_folder(Path(path)).name == "run"

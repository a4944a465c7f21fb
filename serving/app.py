"""The server: OpenAI's API, and the demo's page beside it. One text at a time; a bounded number of requests waits."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as RouteError
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.script import LONGEST_MESSAGE
from common.validation import quoted, suggest
from serving.models import Served
from serving.openai_answer import Answer
from serving.openai_request import ChatRequest, CompletionRequest, RequestError, explain
from serving.server import Settings, is_own

HEALTH = "/health"
LARGEST_BODY = 1_000_000  # bytes; many times any context
LARGEST_DISCARDED = 16_000_000  # bytes still received: a client cut off while sending reads no answer
BODY_SECONDS = 60  # that a part of a request may take to arrive
UNREAD_SHARE = 0.1  # of its time, that a stream is still sent after it to a client that is slow to read it
AT_ONCE = 0.02  # seconds of generation between two looks at the clock and the client
T = TypeVar("T")
Asked: TypeAlias = CompletionRequest | ChatRequest
Pieces: TypeAlias = list[tuple[int, str]]


class Turns:
    """Decides which request begins, waits or is refused. A request has `seconds` from its arrival: a text that is not
    finished by then ends where it is."""

    def __init__(self, served: Served, waiting: int, seconds: float) -> None:
        self.served, self.seconds = served, seconds
        self.places = 1 + waiting
        self.turn = asyncio.Lock()  # first come, first served
        self.thread = ThreadPoolExecutor(1, "generate")
        self.is_ending = False  # the server stops: end the running text, refuse those that wait

    async def answer(self, asked: Asked, deadline: float) -> AsyncGenerator[tuple[Answer, Pieces]]:
        """Yields the answer with its next pieces, and at least once. Close it to stop within a moment. Raises
        RequestError."""
        if not self.places:
            message = "Too many requests are waiting; try again in a moment."
            raise RequestError(message, status=429, code="rate_limit_exceeded")
        self.places -= 1
        try:
            question = await asyncio.to_thread(asked.question, self.served)  # others are served meanwhile
            await self.wait(deadline)
            try:
                answer = Answer(question, self.served)
                steps, loop = answer.make(), asyncio.get_running_loop()
                while pieces := await loop.run_in_executor(self.thread, some, steps):
                    yield answer, pieces
                    if self.is_ending or time.monotonic() >= deadline:
                        break
                yield answer, answer.finish()
            finally:
                self.turn.release()
        finally:
            self.places += 1

    async def wait(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):  # the event loop's clock is time.monotonic
                await self.turn.acquire()
        except TimeoutError:
            message = f"The request waited {self.seconds:g} s for its turn; try again later."
            raise RequestError(message, status=503, code="timeout") from None
        if self.is_ending:
            self.turn.release()
            raise RequestError("The server is shutting down.", status=503)


def some(steps: Iterator[Pieces]) -> Pieces:
    """The pieces of the next steps; none at the end. A hop between threads for each token would slow small models."""
    began, pieces = time.monotonic(), Pieces()
    for step in steps:
        pieces += step
        if time.monotonic() - began >= AT_ONCE:
            break
    return pieces


def make_app(turns: Turns, settings: Settings, key: str, address: str) -> FastAPI:
    """`address` is the one it listens on. With a `key`, requests to the API need it."""
    served = turns.served
    card = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "local"}
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, key=key, address=address)
    app.add_middleware(  # around the guard: a browser asks without a key whether a page may ask
        CORSMiddleware,
        allow_origins=settings.cors,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
    )
    app.exception_handler(RequestError)(refuse)
    app.exception_handler(RequestValidationError)(refuse_body)
    app.exception_handler(RouteError)(refuse_route)

    @app.get(HEALTH)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        require_name(served, name)
        return card

    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await respond(turns, asked, request)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await respond(turns, asked, request)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def nothing(path: str) -> None:  # the page that is mounted behind it knows none of these errors
        raise HTTPException(404)

    return app


class Guard:
    """Refuses requests under a foreign name, without the key, too large, or in a form that a browser lets any page
    send. `address` None: under any name."""

    def __init__(self, app: ASGIApp, key: str, address: str | None) -> None:
        self.app, self.key, self.address = app, key.encode(), address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if problem := self.problem(scope["path"], scope["method"], Headers(scope=scope)):
            return await error_response(problem)(scope, receive, send)
        size, is_whole = 0, False

        async def receive_within_limits() -> Message:
            nonlocal size, is_whole
            try:
                async with asyncio.timeout(None if is_whole else BODY_SECONDS):
                    message = await receive()
                    size += len(message.get("body", b""))
                    while LARGEST_BODY < size <= LARGEST_DISCARDED and message.get("more_body"):
                        message = await receive()
                        size += len(message.get("body", b""))
            except TimeoutError:
                raise HTTPException(408, "The request took too long to arrive.") from None
            if size > LARGEST_BODY:
                raise HTTPException(413, f"The request is larger than {LARGEST_BODY:,} bytes, which no context holds.")
            is_whole = not message.get("more_body")
            return message

        await self.app(scope, receive_within_limits, send)

    def problem(self, path: str, method: str, headers: Headers) -> RequestError | None:
        if not self.key and self.address and not is_own(host := headers.get("host", ""), self.address):
            message = "without a key it answers requests to 127.0.0.1 or localhost only."
            return RequestError(f"This server is not {host!r:.200}: {message}")
        if path.rstrip("/").endswith("/upload"):  # Gradio would keep the file
            return RequestError("There is nothing to upload.", status=404)
        if not path.startswith("/v1/"):  # the page asks for the key itself; a monitor learns nothing from the health
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # In constant time: how long a refusal takes must reveal nothing.
        if self.key and not (scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.key)):
            message = "The key is missing or wrong; send the server's as `Authorization: Bearer KEY`."
            return RequestError(message, status=401, code="invalid_api_key")
        is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        if method == "POST" and not is_json:
            return RequestError("The request needs the header `Content-Type: application/json`.", status=415)
        return None


async def respond(turns: Turns, asked: Asked, request: Request) -> Response:
    """Waits for the whole text, or for the first piece of a stream: then the status is certain."""
    require_name(turns.served, asked.model or turns.served.name)
    now = time.monotonic()
    answers = turns.answer(asked, now + turns.seconds)
    try:
        if asked.stream:
            return EventStream(
                await unless_gone(request, anext(answers)), answers, now + (1 + UNREAD_SHARE) * turns.seconds
            )
        return json_response((await unless_gone(request, last(answers))).whole())
    except (RequestError, HTTPException):
        raise
    except Exception as problem:
        raise explain(problem) from None


async def last(answers: AsyncIterator[tuple[Answer, Pieces]]) -> Answer:
    async for answer, _ in answers:  # noqa: B007
        pass
    return answer


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of the work. Gives it up when the client is gone."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=0.1))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "The client is gone.")
        return task.result()
    finally:
        task.cancel()


class EventStream(StreamingResponse):
    """The answer as server-sent events. A client that has not read them by the deadline loses its turn."""

    def __init__(
        self, first: tuple[Answer, Pieces], answers: AsyncGenerator[tuple[Answer, Pieces]], deadline: float
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies should pass on each piece at once
        self.answers, self.deadline = answers, deadline
        super().__init__(events(*first, answers), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.answers):  # also if the client goes before it was read
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.deadline):
                    await super().__call__(scope, receive, send)


async def events(answer: Answer, pieces: Pieces, rest: AsyncIterator[tuple[Answer, Pieces]]) -> AsyncIterator[str]:
    for part in answer.opening():
        yield event(part)
    try:
        while True:
            for part in (part for piece in pieces for part in answer.piece(*piece)):
                yield event(part)
            try:
                _, pieces = await anext(rest)
            except StopAsyncIteration:
                break
        for part in answer.closing():
            yield event(part)
    except Exception as problem:  # the status is already sent
        yield event(content(explain(problem)))
    yield "data: [DONE]\n\n"


def event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part)}\n\n"


def require_name(served: Served, name: str) -> None:
    """Raises RequestError for the name of another model."""
    if name != served.name:
        message = f"The model {name!r:.200} does not exist; this server has {served.name!r}."
        raise RequestError(message, "model", 404, "model_not_found")


def json_response(content: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """In ASCII: text that is sent back to a client may contain half a character, which UTF-8 cannot express."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def content(problem: RequestError) -> dict[str, Any]:
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if problem.status == 429 else kind
    said = str(problem)[:LONGEST_MESSAGE]
    return {"error": {"message": said, "type": kind, "param": problem.param, "code": problem.code}}


def error_response(problem: RequestError) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
    return json_response(content(problem), problem.status, headers.get(problem.status))


async def refuse(request: Request, problem: RequestError) -> Response:
    return error_response(problem)


async def refuse_body(request: Request, problem: RequestValidationError) -> Response:
    """pydantic's first error, in OpenAI's form."""
    error = problem.errors()[0]
    if error["type"] == "json_invalid":
        return error_response(RequestError(f"The body of the request is not JSON: {error['ctx']['error']}."))
    _, *place = error["loc"]
    name = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place)[1:101]
    if not name:
        return error_response(RequestError("The body of the request is no JSON object."))
    if error["type"] == "extra_forbidden":
        known = (CompletionRequest if request.url.path == "/v1/completions" else ChatRequest).model_fields
        said, code = f"There is no parameter {name!r}.{suggest(name, known)}", "unknown_parameter"
        return error_response(RequestError(said, name, code=code))
    said = error["ctx"]["error"] if error["type"] == "value_error" else error["msg"]
    said = f"{name} is missing." if error["type"] == "missing" else f"{name} is {quoted(error['input'])}: {said}."
    return error_response(RequestError(said, name))


async def refuse_route(request: Request, problem: RouteError) -> Response:
    if problem.status_code == 400:
        return error_response(RequestError("The body of the request is not JSON."))
    if problem.status_code not in (404, 405):
        return error_response(RequestError(problem.detail, status=problem.status_code))
    message = (
        f"There is no {request.method} {request.url.path:.200}; there are GET /v1/models, POST /v1/completions, POST "
        "/v1/chat/completions and GET /health."
    )
    return error_response(RequestError(message, status=problem.status_code))

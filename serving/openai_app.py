"""OpenAI's API over HTTP: who may ask, how much, and how the answer is sent, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.generation_queue import Abandoned, GenerationQueue, Job
from serving.openai_answer import Answer
from serving.openai_request import RequestError, explain, read_question, require_name
from serving.served import Served
from serving.server import OWN_HOSTS, host_name

HEALTH = "/health"
LARGEST_BODY = 1_000_000  # bytes; many times any context
LARGEST_DISCARDED = 16_000_000  # bytes still received: a client cut off while sending reads no answer


def make_app(
    served: Served, queue: GenerationQueue, key: str | None, address: str, origins: Sequence[str] = ()
) -> Starlette:
    """`address` is the one it listens on. Without a key it answers only requests to that address and to a browser's
    names for this machine. Pages from `origins` may read its answers ("*": all pages)."""

    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [served.card()]})

    async def show_model(request: Request) -> Response:
        require_name(served, request.path_params["name"])
        return json_response(served.card())

    async def show_health(request: Request) -> Response:
        return json_response({"status": "ok"})

    return Starlette(
        routes=[
            Route(HEALTH, show_health),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", show_model),
            Route("/v1/completions", Completions(served, queue, is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", Completions(served, queue, is_chat=True), methods=["POST"]),
        ],
        middleware=[
            # First: a browser asks without a key whether a page may ask, and the page must be able to read a refusal.
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                allow_private_network=True,
            ),
            Middleware(RequireKey, key) if key else Middleware(RequireHost, [*OWN_HOSTS, address]),
        ],
        exception_handlers={RequestError: refuse, HTTPException: refuse_route},
    )


class RequireHost:
    """A page from elsewhere could point its own name here and read the answers (DNS rebinding)."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if host_name(host) in self.names:
            return await self.app(scope, receive, send)
        message = f"This server is not {host!r:.200}: without a key it answers requests to 127.0.0.1 or localhost only."
        await error_response(RequestError(message))(scope, receive, send)


class RequireKey:
    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == HEALTH:  # a monitor has no key, and learns nothing else
            return await self.app(scope, receive, send)
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # In constant time: how long a refusal takes must reveal nothing.
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.expected):
            return await self.app(scope, receive, send)
        message = "The key is missing or wrong; send the server's as `Authorization: Bearer KEY`."
        await error_response(RequestError(message, status=401, code="invalid_api_key"))(scope, receive, send)


class Completions:
    """Answers posted requests, one at a time."""

    def __init__(self, served: Served, queue: GenerationQueue, is_chat: bool) -> None:
        self.served, self.queue, self.is_chat = served, queue, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        deadline = time.monotonic() + self.queue.seconds
        with contextlib.suppress(ClientDisconnect, Abandoned):
            job = await self.start(request, deadline)
            gone = asyncio.create_task(abandon_when_gone(request, job))
            try:
                response = await self.respond(job, deadline)
                with contextlib.suppress(TimeoutError):  # a client that does not read its answer
                    async with self.queue.time_limit(deadline):
                        await response(scope, receive, send)
            finally:
                gone.cancel()
                job.abandon()

    async def start(self, request: Request, deadline: float) -> Job:
        """Raises RequestError for a bad request, ClientDisconnect if the client is gone."""
        with contextlib.ExitStack() as held:
            held.enter_context(self.queue.place())
            try:
                async with self.queue.time_limit(deadline):
                    body = await read_body(request)
                    # Tokenizing a long text takes time; others are served meanwhile.
                    question = await asyncio.to_thread(read_question, body, self.is_chat, self.served)
            except TimeoutError:
                raise RequestError("The request took too long to arrive.", status=408) from None
            return self.queue.start(question, deadline, held.pop_all().close)

    async def respond(self, job: Job, deadline: float) -> Response:
        """Waits for the whole text, or for the first piece of a stream: then the status is certain. Raises
        RequestError, Abandoned."""
        answer, pieces = Answer(job, self.served), job.pieces()
        try:
            async with self.queue.time_limit(deadline):
                first = await anext(pieces, None) if job.question.stream else None
                if first is None:  # nothing to stream, or an error
                    completions = await job.completions()
        except TimeoutError:
            raise RequestError("The answer did not begin in time.", status=503, code="timeout") from None
        except (RequestError, Abandoned):
            raise
        except Exception as problem:
            raise explain(problem) from None
        if not job.question.stream:
            return json_response(answer.whole(completions))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies should pass on each piece at once
        return StreamingResponse(events(job, answer, first, pieces), headers=headers, media_type="text/event-stream")


async def read_body(request: Request) -> bytes:
    """Raises RequestError if the body is too large, or not declared as JSON."""
    # A browser lets any page post other types here without asking first; for JSON it asks.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("The request needs the header `Content-Type: application/json`.", status=415)
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= LARGEST_BODY:
            body += chunk
        elif size > LARGEST_DISCARDED:
            break
    if size > LARGEST_BODY:
        raise RequestError(f"The request is larger than {LARGEST_BODY:,} bytes, which no context holds.", status=413)
    return bytes(body)


async def abandon_when_gone(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.abandon()


async def events(
    job: Job, answer: Answer, first: tuple[int, str] | None, rest: AsyncIterator[tuple[int, str]]
) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    for part in answer.opening():
        yield event(part)
    try:
        while first is not None:
            for part in answer.piece(*first):
                yield event(part)
            first = await anext(rest, None)
        for part in answer.closing(await job.completions()):
            yield event(part)
    except Abandoned:
        return
    except Exception as problem:  # the status is already sent
        yield event(explain(problem).content())
    yield "data: [DONE]\n\n"


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def json_response(content: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """In ASCII: text that is sent back to a client may contain half a character, which UTF-8 cannot express."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def error_response(problem: RequestError) -> Response:
    return json_response(problem.content(), problem.status, problem.headers())


async def refuse(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestError)
    return error_response(problem)


async def refuse_route(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = (
        f"There is no {request.method} {request.url.path:.200}; there are GET /v1/models, POST /v1/completions, POST "
        "/v1/chat/completions and GET /health."
    )
    return error_response(RequestError(message, status=problem.status_code))

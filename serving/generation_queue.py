"""One generation at a time, in its own thread, and a bounded queue of requests that wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from generation.completion import Completion
from generation.scoring import Likelihood, likelihoods, prompt_likelihoods
from generation.stream import only_text, stream
from serving.openai_request import Question, RequestError
from serving.served import Served

GRACE = 5.0  # seconds after a request's deadline to finish its last token and send its answer
GRACE_AT_END = 1.0  # seconds, when the server stops


class Abandoned(Exception):
    """The client is gone."""


class Job:
    """A generation, from its place in the queue to its last token. `pieces` streams its text."""

    def __init__(self, question: Question, deadline: float) -> None:
        self.question, self.deadline = question, deadline
        # If they are asked for: of each text's prompt, if that is echoed, and of each text, growing.
        self.of_prompts: list[list[Likelihood]] = []
        self.of_texts: list[list[Likelihood]] = [[] for _ in question.prompts]
        self.abandoned = threading.Event()
        self.began = False
        self.fresh: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()  # None: the end
        self.task: asyncio.Task[list[Completion]]

    def abandon(self) -> None:
        """Stop it within one token, or before it begins."""
        self.abandoned.set()
        if not self.began:
            self.task.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, str]]:
        """(index of a text, its next piece)"""
        while (piece := await self.fresh.get()) is not None:
            yield piece

    async def completions(self) -> list[Completion]:
        """Raises RequestError if its deadline passed before it began, Abandoned if it was abandoned."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise Abandoned
        return self.task.result()


class GenerationQueue:
    """Decides which request begins, waits or is refused. Call its methods from one event loop.

    A request has `seconds` from its arrival. A text that is not finished by then ends where it is; a request that has
    not begun gets an error.
    """

    def __init__(self, served: Served, waiting: int, seconds: float) -> None:
        self.served, self.seconds = served, seconds
        self.places = 1 + waiting
        self.turn = asyncio.Lock()  # first come, first served
        self.thread = ThreadPoolExecutor(1, "generate")
        self.stopping = threading.Event()
        self.limits: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Held from before a request is read, so that memory holds a bounded number. Raises RequestError."""
        if self.stopping.is_set():
            raise ending()
        if not self.places:
            message = "Too many requests are waiting; try again in a moment."
            raise RequestError(message, status=429, code="rate_limit_exceeded")
        self.places -= 1
        try:
            yield
        finally:
            self.places += 1

    @contextlib.asynccontextmanager
    async def time_limit(self, deadline: float) -> AsyncIterator[None]:
        """Raises TimeoutError inside when the deadline is long past, or when the server stops."""
        async with asyncio.timeout_at(deadline + GRACE) as limit:  # the event loop's clock is time.monotonic
            self.limits.add(limit)
            try:
                yield
            finally:
                self.limits.remove(limit)

    def start(self, question: Question, deadline: float, give_back: Callable[[], None]) -> Job:
        """`give_back` is called once the job no longer uses the thread or the queue."""
        job = Job(question, deadline)
        job.task = asyncio.create_task(self.run(job))

        def over(task: asyncio.Task[list[Completion]]) -> None:
            give_back()
            job.fresh.put_nowait(None)

        job.task.add_done_callback(over)
        return job

    async def run(self, job: Job) -> list[Completion]:
        async with self.turn:
            if self.stopping.is_set():
                raise ending()
            if time.monotonic() >= job.deadline:
                message = f"The request waited {self.seconds:g} s for its turn; try again later."
                raise RequestError(message, status=503, code="timeout")
            job.began = True
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.thread, self.answer, job, loop)

    def answer(self, job: Job, loop: asyncio.AbstractEventLoop) -> list[Completion]:
        """Make the texts of a job, in the thread."""
        model, tokenizer, question = self.served.model, self.served.tokenizer, job.question
        count, bias = question.logprobs, only_text(model, tokenizer)
        if count is not None and question.echo:
            job.of_prompts = [prompt_likelihoods(model, prompt, count, bias) for prompt in question.prompts]
        completions = [Completion(tokenizer, question.sampling.stop) for _ in question.prompts]

        def show(index: int, piece: str) -> None:
            if piece:
                loop.call_soon_threadsafe(job.fresh.put_nowait, (index, piece))

        for tokens, logits in stream(model, question.prompts, question.sampling, bias):
            chosen = [] if count is None else likelihoods(logits, tokens, count, bias)
            for i, (completion, token) in enumerate(zip(completions, tokens, strict=True)):
                if chosen and not completion.ended and token not in tokenizer.end_ids:
                    job.of_texts[i].append(chosen[i])
                show(i, completion.push(token))
            late = job.abandoned.is_set() or self.stopping.is_set() or time.monotonic() >= job.deadline
            if late or all(completion.ended for completion in completions):
                break
        for i, completion in enumerate(completions):
            show(i, completion.finish())
        return completions

    def stop(self) -> None:
        """Stop the running generation within one token and refuse the waiting ones."""
        self.stopping.set()
        soon = time.monotonic() + GRACE_AT_END
        for limit in self.limits:
            limit.reschedule(min(soon, limit.when() or soon))


def ending() -> RequestError:
    return RequestError("The server is shutting down.", status=503)

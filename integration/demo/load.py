"""The load on a server: prompts, a rising and falling number of running requests, and samples."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .servers import Server, Verifications

PROMPT_CHARACTERS = 240
MAX_REQUESTS_PER_SLOT = 50  # of one phase, for each request that it keeps running
SAMPLE_SECONDS = 0.25
REQUEST_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class Prompt:
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What one request returned.

    Args:
        prompt: its number in the list of prompts.
        concurrency: the load when it was sent.
        token_ids: of `text`.
        finish_reason: "length" or "stop".
        likeliest: by position, the two likeliest tokens as (log probability, id), where asked for.
    """

    prompt: int
    concurrency: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    likeliest: tuple[tuple[tuple[float, int], ...], ...] = ()

    @property
    def content(self) -> tuple[str, tuple[int, ...], str | None]:
        """What has to equal another server's answer."""
        return self.text, self.token_ids, self.finish_reason


@dataclass(frozen=True)
class Sample:
    """Counters at one moment, all since the server's start; a difference of two is a rate.

    Args:
        seconds: since the load began.
        target: requests that the load is to reach or to fall to.
        running: requests that the client keeps in flight.
        tokens: received by the client.
        off: whether the last step did not speculate; None on a server that never does.
    """

    seconds: float
    target: int
    running: int
    tokens: int
    verifications: Verifications
    off: bool | None = None
    flips: int = 0
    steps_on: int = 0
    steps_off: int = 0


@dataclass(frozen=True)
class Phase:
    """One level of the load, from when it is reached to its end."""

    concurrency: int
    requests: int
    begin: Sample
    end: Sample


def ramp(peak: int) -> list[int]:
    """Requests to keep running, phase by phase: 1, 2, 4, ... `peak` ... 4, 2, 1."""
    rising = [1 << i for i in range(peak.bit_length()) if 1 << i < peak]
    return [*rising, peak, *reversed(rising)]


def snippets(sources: Iterable[str], num: int) -> list[str]:
    """Beginnings of functions, from all sources in turn; whole lines, PROMPT_CHARACTERS at most.

    Raises:
        ValueError: the sources hold fewer than `num`.
    """
    per_source = []
    for source in sources:
        starts = [match.start() + 1 for match in re.finditer(r"\n *def ", source)]
        cut = [source[start : start + PROMPT_CHARACTERS] for start in starts]
        per_source.append([text[: text.rfind("\n") + 1] for text in cut if "\n" in text])
    found = [text for texts in itertools.zip_longest(*per_source) for text in texts if text]
    if len(found) < num:
        raise ValueError(f"{num} prompts are needed, but the sources hold {len(found)} functions")
    return found[:num]


def prompts(sources: Iterable[str], num: int, max_tokens: int) -> list[Prompt]:
    """Prompts whose lengths differ, from half of `max_tokens` on, so that they end apart."""
    shortest = (max_tokens + 1) // 2
    span = max_tokens - shortest + 1
    return [
        Prompt(text, max_tokens - i * 7 % span) for i, text in enumerate(snippets(sources, num))
    ]


@dataclass
class Load:
    """Streams prompts through a server's `/generate`, as many at a time as asked for.

    Args:
        show: called after each sample with all of them.
    """

    server: Server
    session: aiohttp.ClientSession
    prompts: list[Prompt]
    show: Callable[[Sequence[Sample]], None] = lambda samples: None
    answers: list[Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._numbers = itertools.count()
        self._target = 0
        self._began = time.monotonic()

    async def run(self, phases: Iterable[int], seconds: float) -> list[Phase]:
        """Bring the load to each level of `phases` and hold it there, then let it end.

        Raises:
            ServerError: the server ended, or a request failed.
        """
        self._began = time.monotonic()
        sampler = asyncio.create_task(self._sample_forever())
        try:
            held = [await self._hold(concurrency, seconds) for concurrency in phases]
            await self.finish()
        finally:
            left = [sampler, *self._tasks]
            ended = [task.cancel() for task in left]
            await asyncio.gather(*left, return_exceptions=True)
        if not ended[0]:  # the sampler never ends by itself but with an error
            sampler.result()
        return held

    async def ask(self, numbers: Iterable[int], concurrency: int) -> None:
        """Send these prompts, `concurrency` at a time, and wait for their answers."""
        for number in numbers:
            self._send(number, concurrency)
            while len(self._tasks) >= concurrency:
                await self._collect(None)
        await self.finish()

    async def likeliest(self) -> list[Answer]:
        """Every prompt's answer, one request at a time, with the two likeliest tokens."""
        answers = []
        for number in range(len(self.prompts)):
            async for answer in self._stream(number, return_logprob=True, top_logprobs_num=2):
                last = answer
            answers.append(_answer(number, 1, last))
        return answers

    async def finish(self) -> None:
        """Wait for all answers."""
        while self._tasks:
            await self._collect(None)

    async def sample(self) -> Sample:
        """Read all counters now."""
        try:
            info = await self.server.info(self.session)
        except (aiohttp.ClientError, TimeoutError) as error:
            self.server.fail(f"did not report its state ({error!r})")
        state = info.get("fused_fallback", {})
        names = ("off", "flips", "steps_on", "steps_off")
        return Sample(
            seconds=time.monotonic() - self._began,
            target=self._target,
            running=len(self._tasks),
            tokens=self.tokens,
            verifications=self.server.verifications(),
            **{name: state[name] for name in names if name in state},
        )

    async def _hold(self, concurrency: int, seconds: float) -> Phase:
        self._target = concurrency
        while len(self._tasks) > concurrency:
            await self._collect(None)
        self._fill(concurrency)
        begin, answered = await self.sample(), len(self.answers)
        left = MAX_REQUESTS_PER_SLOT * concurrency
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0 and left > 0:
            await self._collect(remaining)
            left -= self._fill(concurrency)
        return Phase(concurrency, len(self.answers) - answered, begin, await self.sample())

    def _fill(self, concurrency: int) -> int:
        """Send what is missing to `concurrency` running requests; returns how many."""
        missing = range(concurrency - len(self._tasks))
        for _ in missing:
            self._send(next(self._numbers) % len(self.prompts), concurrency)
        return len(missing)

    def _send(self, number: int, concurrency: int) -> None:
        self._tasks.add(asyncio.create_task(self._request(number, concurrency)))

    async def _collect(self, seconds: float | None) -> None:
        """Wait for the next answer, or for `seconds`."""
        done, self._tasks = await asyncio.wait(
            self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            self.answers.append(task.result())

    async def _request(self, number: int, concurrency: int) -> Answer:
        answer: dict[str, Any] = {}
        tokens = 0
        async for answer in self._stream(number):
            received = answer["meta_info"]["completion_tokens"]
            self.tokens, tokens = self.tokens + received - tokens, received
        return _answer(number, concurrency, answer)

    async def _stream(self, number: int, **further: Any) -> AsyncIterator[dict[str, Any]]:
        """The answer to a prompt as it grows."""
        prompt = self.prompts[number]
        body = {
            "text": prompt.text,
            "sampling_params": {"temperature": 0, "max_new_tokens": prompt.max_tokens},
            "stream": True,
            **further,
        }
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
        try:
            async with self.session.post(
                f"{self.server.url}/generate", json=body, timeout=timeout
            ) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield json.loads(line.removeprefix(b"data: "))
        except (aiohttp.ClientError, TimeoutError) as error:
            self.server.fail(f"did not answer prompt {number} ({error!r})")

    async def _sample_forever(self) -> None:
        while True:
            self.samples.append(await self.sample())
            self.show(self.samples)
            await asyncio.sleep(SAMPLE_SECONDS)


def _answer(number: int, concurrency: int, answer: dict[str, Any]) -> Answer:
    """What the last chunk of a stream holds."""
    meta_info = answer["meta_info"]
    likeliest = meta_info.get("output_top_logprobs") or ()
    return Answer(
        prompt=number,
        concurrency=concurrency,
        text=answer["text"],
        token_ids=tuple(answer["output_ids"]),
        finish_reason=(meta_info["finish_reason"] or {}).get("type"),
        likeliest=tuple(tuple((p, token) for p, token, *_ in top) for top in likeliest),
    )

"""One real `sglang serve`: started on a free loopback port, watched, killed with its children."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import aiohttp

HOST = "127.0.0.1"
PORTS = range(21000, 29000)  # below the ports that Linux hands out to outgoing connections
LOG_LINES = 30  # of a dead server's log, in the error
# of a step that speculated: others have no accept length
DECODE_LINE = re.compile(r"Decode batch.*#running-req: (\d+),.*accept len: ([\d.]+)")


class ServerError(RuntimeError):
    """The server ended or did not answer in time; the text holds the end of its log."""


def free_port() -> int:
    """A port of PORTS that nothing listens on.

    Raises:
        ServerError: all are taken.
    """
    start = os.getpid() * 97 % len(PORTS)  # two demos at once begin their search apart
    for port in (*PORTS[start:], *PORTS[:start]):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port among {PORTS.start} to {PORTS.stop - 1} on {HOST}")


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process started with `start_new_session=True`, and everything it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


@dataclass(frozen=True)
class Verifications:
    """Verify steps since the server's start, counted once for each request in the batch.

    Args:
        count: how many.
        tokens: what they accepted, bonus token included; `tokens / count` is the accept length.
    """

    count: int = 0
    tokens: float = 0.0


class Server:
    """A server between `async with` and its end.

    Args:
        command: `sglang serve` and its arguments, without host, port and log settings.
        env: its environment.
        log: the file that takes its output.
        timeout: seconds that the start may take.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        timeout: float,
    ) -> None:
        self.command, self.env, self.log, self.timeout = list(command), dict(env), log, timeout
        self.port = free_port()
        self.seconds_to_start = 0.0
        self._verifications = Verifications()
        self._log_offset = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        self._launch()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        kill_group(self.process)

    def _launch(self) -> None:
        # Per decode step: the accept length of the steps in between is nowhere else to be had.
        fixed = ["--host", HOST, "--port", str(self.port), "--decode-log-interval", "1"]
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command, *fixed],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def wait_until_ready(
        self, session: aiohttp.ClientSession, waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Return once the server answers requests; call `waiting` now and then until it does.

        Raises:
            ServerError: it ended, or `timeout` seconds passed.
        """
        ports = [self.port]
        while not await self._healthy(session):
            if len(ports) == 1 and "address already in use" in self.log_end().lower():
                kill_group(self.process)  # it stays up without its port
                self.port = free_port()
                ports.append(self.port)
                self._launch()
            elif self.process.poll() is not None:
                self.fail(f"ended with exit code {self.process.returncode} at start")
            elif time.monotonic() - self.began > self.timeout:
                self.fail(f"did not answer within {self.timeout:.0f} seconds")
            waiting()
            await asyncio.sleep(0.3)
        self.seconds_to_start = time.monotonic() - self.began

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def info(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """What the scheduler reports of itself: `internal_states[0]` of `/server_info`."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with session.get(f"{self.url}/server_info", timeout=timeout) as response:
            response.raise_for_status()
            return (await response.json())["internal_states"][0]

    def verifications(self) -> Verifications:
        """Read what the server has logged since the last call; returns the sums since its start."""
        with self.log.open("rb") as log:
            log.seek(self._log_offset)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._log_offset += len(text)
        count, tokens = self._verifications.count, self._verifications.tokens
        for line in DECODE_LINE.finditer(text.decode(errors="replace")):
            running, accept_length = int(line[1]), float(line[2])
            count, tokens = count + running, tokens + running * accept_length
        self._verifications = Verifications(count, tokens)
        return self._verifications

    def log_end(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def fail(self, what: str) -> NoReturn:
        """Raise a ServerError that says what happened, with the end of the log and its path."""
        raise ServerError(
            f"the server {what}. The last {LOG_LINES} lines of its log {self.log}:\n\n"
            f"{self.log_end()}\n\ncommand: {' '.join(self.command)}"
        )

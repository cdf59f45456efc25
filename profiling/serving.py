"""Servers to be measured: one mode each, in a process of its own that times every request.

The process gets the `Spec` as its argument, orders as JSON lines on its standard input, and
answers each with one line. It ends, and its server with it, when that input closes; all that it
starts is of its process group.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from select import select
from typing import Any, NamedTuple

from ..integration.demo import checkout

MODES = ("nospec", "static", "step0_warm", "step0_cold", "on", "off", "threshold")
RESULTS = Path(__file__).parent / "results"
FUSED = ("on", "off", "threshold")
SLACK_TOKENS = 32  # of KV a request: steps allocate slots before they know what they accept
# SGLang holds back a request for which there is no place, the ones that just ended still counted,
# until another ends.
SLACK_REQUESTS = 8
LEAD_S = 0.01  # that a request is ahead of others, for the server to begin with it
NEVER = 1 << 20  # requests, more than any load
CHUNK_TOKENS = 32  # that a request returns at a time, arbitrary; it has the first one alone
PORTS_PER_SERVER = 1100  # SGLang takes further ports up to 1000 above its own
TIMEOUT_S = 3600.0  # arbitrary: longer than any start and any load
SKIP_DRAFT = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"


@dataclass(frozen=True)
class Spec:
    """What to start.

    Args:
        mode: one of MODES. `on` is the fused fallback with a threshold that no load reaches, `off`
            one that every load does; the step 0 modes are SGLang's adaptive speculation held there.
        model_path, draft_model_path: of target and draft.
        arguments: further `ServerArgs` by name, which win over those set here.
        threshold: of the mode `threshold`.
        through: "engine" for `sglang.Engine`, "serve" for `sglang serve` over HTTP.
        accept_length: simulated; None leaves acceptance to the models.
        env: further environment variables.
    """

    mode: str
    model_path: str
    draft_model_path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    threshold: int = 64
    through: str = "engine"
    accept_length: float | None = None
    env: dict[str, str] = field(default_factory=dict)

    def server_arguments(self) -> dict[str, Any]:
        """What `flags.server_args` takes, or `sglang serve` as flags."""
        # below the ports that Linux hands out to outgoing connections
        port = 20000 + PORTS_PER_SERVER * MODES.index(self.mode)
        arguments = {
            "model_path": self.model_path,
            "skip_tokenizer_init": True,
            "random_seed": 1,
            "port": port,
            "nccl_port": port + PORTS_PER_SERVER - 1,
        }
        if self.mode != "nospec":
            arguments |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": self.draft_model_path,
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 4,
            }
        if self.mode.startswith("step0"):
            config = Path(tempfile.mkdtemp()) / "step0.json"
            # SGLang wants the number of steps among the candidates of some batch size.
            steps = {1: [0], NEVER: [arguments["speculative_num_steps"]]}
            config.write_text(
                json.dumps({size: {"candidate_steps": allowed} for size, allowed in steps.items()})
            )
            arguments |= {"speculative_adaptive": True, "speculative_adaptive_config": str(config)}
        if self.mode in FUSED:
            threshold = {"on": NEVER, "off": 1, "threshold": self.threshold}[self.mode]
            arguments |= {
                "speculative_fused_fallback": True,
                "speculative_fused_fallback_threshold": threshold,
            }
        return arguments | self.arguments

    def environment(self) -> dict[str, str]:
        env = dict(self.env)
        if self.accept_length:
            env["SGLANG_SIMULATE_ACC_LEN"] = str(self.accept_length)
        if self.mode == "step0_cold":
            env[SKIP_DRAFT] = "1"
        return env


def refusal(mode: str) -> str | None:
    """Why the installed SGLang has no such mode; None where it has."""
    if mode.startswith("step0"):
        from sglang.srt.environ import envs

        if not hasattr(envs, SKIP_DRAFT):
            return f"mode {mode}: SGLang {version('sglang')} has no step 0"
    return None


def refuse(modes: Iterable[str]) -> None:
    """End the process, with the text, where the installed SGLang lacks one of the modes."""
    refused = [text for text in map(refusal, modes) if text]
    if refused:
        raise SystemExit("\n".join(refused))


class Timing(NamedTuple):
    """One request, seconds of `time.perf_counter` where the client receives.

    Args:
        begin: when it was sent, or could be worked on.
        chunks: arrivals, with the tokens that had come by then.
    """

    begin: float
    chunks: list[tuple[float, int]]

    @property
    def first(self) -> float:
        """The arrival of the first token."""
        return self.chunks[0][0]

    @property
    def last(self) -> float:
        """The arrival of the last token."""
        return self.chunks[-1][0]

    @property
    def tokens(self) -> int:
        return self.chunks[-1][1]


class Answer(NamedTuple):
    """What one request returned.

    Args:
        rid: SGLang's name for it.
        tokens: the output.
        tops: by position, the likeliest tokens as (log probability, token), where asked for.
    """

    rid: str
    tokens: list[int]
    tops: list[list[tuple[float, int]]]


# ---- what the benches have in common


def add_options(parser: argparse.ArgumentParser, *, concurrency: list[int]) -> None:
    """The servers' and the load's options; `concurrency` is the default."""
    add = parser.add_argument
    add("--model-path", required=True)
    add("--draft-model-path", required=True)
    add("--concurrency", nargs="+", type=int, default=concurrency, help="requests")
    add("--input-len", type=int, default=256, help="tokens; of text prompts the most")
    add("--output-len", type=int, default=128, help="tokens")
    add("--threshold", type=int, default=192, help="of the threshold mode (%(default)s)")
    add("--through", choices=("engine", "serve"), default="engine")
    add("--simulate-accept-length", type=float, help="SGLANG_SIMULATE_ACC_LEN of every server")
    add("--load-format", default="auto")
    add("--kv-tokens", type=int, help="size of each KV pool (default: what the load needs)")
    add("--server-args", type=json.loads, default={}, metavar="JSON", help="further ServerArgs")
    add("--commit", help="recorded; default: the repository's HEAD")
    parser.set_defaults(lead_len=0)  # the benches that send a request ahead have an option for it


def spec_of(options: argparse.Namespace, mode: str, **env: str) -> Spec:
    """A server whose KV pool holds the largest load, and whose graphs cover it."""
    from ..integration.adapters.versions import adapter_for

    most = most_requests(options)
    flag = adapter_for().graph_runner.flag
    arguments = {
        "load_format": options.load_format,
        "max_running_requests": most,
        flag.removeprefix("--").replace("-", "_"): most,
        "max_total_tokens": kv_tokens(options),
        # `max_total_tokens` alone sizes the pool; the rest is left to graphs and other servers.
        "mem_fraction_static": 0.97,
        **options.server_args,
    }
    return Spec(
        mode=mode,
        model_path=options.model_path,
        draft_model_path=options.draft_model_path,
        arguments=arguments,
        threshold=options.threshold,
        through=options.through,
        accept_length=options.simulate_accept_length,
        env=env,
    )


def most_requests(options: argparse.Namespace) -> int:
    return max(options.concurrency) + SLACK_REQUESTS


def kv_tokens(options: argparse.Namespace) -> int:
    a_request = options.input_len + options.output_len + SLACK_TOKENS
    return options.kv_tokens or most_requests(options) * a_request + options.lead_len


def vocab_size(options: argparse.Namespace) -> int:
    config = json.loads((Path(options.model_path) / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def result_path(bench: str) -> Path:
    """`profiling/results/<bench>_<device>_<sglang>.json`."""
    device = device_name().split()[-1].lower()
    return RESULTS / f"{bench}_{device}_{version('sglang')}.json"


def provenance(commit: str | None) -> dict[str, str | None]:
    """What a result says of its origin; the commit is by default the checkout's."""
    import torch

    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    return {
        "device": device_name(),
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "commit": commit or checkout.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([name, *sys.argv[1:]]),
    }


# ---- in the parent


class ServerProcess:
    """A server from its start, in the background, to `stop` or `kill`.

    Args:
        spec: of the server.
        log: the file that takes its output.
        timeout_s: of its start, in which kernels may be compiled, and of an order.
    """

    def __init__(self, spec: Spec, log: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self.spec, self.log, self.timeout_s = spec, log, timeout_s
        self._began, self.start_s = time.monotonic(), 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=os.environ | spec.environment(),
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Return once it answers requests; `start_s` and `info` (`/server_info`) are set then.

        Raises:
            RuntimeError: the server ended or is late; the text holds the end of its log.
        """
        if not self.start_s:
            self.info: dict[str, Any] = self._answer()
            self.start_s = time.monotonic() - self._began

    def order(self, name: str, **arguments: Any) -> Any:
        """Call a method of `Client` there, once it is ready.

        Raises:
            RuntimeError: the server ended or is late; the text holds the end of its log.
        """
        self.wait_until_ready()
        with suppress(BrokenPipeError):  # it has ended, as `_answer` says
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def burst(
        self, prompts: list[list[int]], new_tokens: int, lead: list[int] | None = None
    ) -> list[Timing]:
        """Send all prompts at once, behind the lead; greedy, exactly `new_tokens` tokens each."""
        timings = self.order("burst", prompts=prompts, new_tokens=new_tokens, lead=lead)
        return [Timing(*timing) for timing in timings]

    def generate(
        self, prompts: list[list[int]], lengths: list[int], *, tops: int = 0
    ) -> list[Answer]:
        """Send all prompts at once; greedy answers of exactly these lengths.

        Args:
            tops: how many of the likeliest tokens each position of an answer lists.
        """
        answers = self.order("generate", prompts=prompts, lengths=lengths, tops=tops)
        return [Answer(*answer) for answer in answers]

    def state(self) -> dict[str, Any] | None:
        """The fused fallback's counters now; None in other modes."""
        return self.order("server_info")["internal_states"][0].get("fused_fallback")

    def stop(self) -> None:
        """Have the server give its memory back and end; does nothing the second time."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(60)
        self.kill()

    def kill(self) -> None:
        """End the server at once, with everything that it started."""
        from ..integration.demo.servers import kill_group

        kill_group(self._process)

    def _answer(self) -> Any:
        answered, _, _ = select([self._process.stdout], [], [], self.timeout_s)
        line = self._process.stdout.readline() if answered else ""
        if not line:
            what = "ended" if answered else f"did not answer within {self.timeout_s:g} s"
            self.kill()  # a late answer would be taken for the next one
            log = self.log.read_text(errors="replace")
            raise RuntimeError(f"{self.spec.mode} {what}, see {self.log}:\n{log[-4000:]}")
        return json.loads(line)


# ---- in the server's process


class Client:
    """Runs on one event loop and sends to one server."""

    loop: asyncio.AbstractEventLoop

    def stream(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        """The server's chunks for one request, of `/generate`'s parameters."""
        raise NotImplementedError

    def server_info(self) -> dict[str, Any]:
        raise NotImplementedError

    async def start_profile(self, arguments: dict[str, Any]) -> None:
        """Have the scheduler trace: SGLang's `/start_profile`."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], lengths: list[int], tops: int) -> list[Answer]:
        """All prompts at once."""

        async def answer(prompt: list[int], length: int) -> Answer:
            logprobs = {"return_logprob": True, "top_logprobs_num": tops} if tops else {}
            async for chunk in self.stream(**greedy(prompt, length), **logprobs):
                output = chunk
            by_position = output["meta_info"].get("output_top_logprobs", ())
            likeliest = [[top[:2] for top in position] for position in by_position]
            return Answer(output["meta_info"]["id"], output["output_ids"], likeliest)

        async def all_at_once() -> list[Answer]:
            return await asyncio.gather(*map(answer, prompts, lengths))

        return self.loop.run_until_complete(all_at_once())

    def burst(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        lead: list[int] | None = None,
        profile: dict[str, Any] | None = None,
        prefill: bool = False,
    ) -> list[Timing]:
        """All prompts at once; profile if asked, from when all have their first token.

        Args:
            lead: a prompt that is sent ahead, whose prefill keeps the server busy until all others
                have arrived; they begin when it is done.
            profile: for `start_profile`, with `num_steps`.
            prefill: profile from before they are sent.
        """

        async def all_at_once() -> list[Timing]:
            if profile and prefill:
                await self.start_profile(profile)
            if lead:
                ahead = asyncio.create_task(self._timed(lead, 1))
                await asyncio.sleep(LEAD_S)
            waiting = len(prompts)
            decoding = asyncio.Event()

            def started() -> None:
                nonlocal waiting
                waiting -= 1
                if not waiting:
                    decoding.set()

            tasks = [asyncio.create_task(self._timed(p, new_tokens, started)) for p in prompts]
            if profile and not prefill:
                await decoding.wait()
                await self.start_profile(profile)
            timings = await asyncio.gather(*tasks)
            begin = (await ahead).first if lead else None
            return [timing._replace(begin=begin or timing.begin) for timing in timings]

        return self.loop.run_until_complete(all_at_once())

    def ramp(
        self,
        steps: list[int],
        seconds: float,
        *,
        input_len: int,
        new_tokens: int,
        vocab_size: int,
        seed: int,
    ) -> tuple[list[float], list[Timing]]:
        """Keep `steps[i]` requests running for `seconds` each, with random prompts.

        Returns:
            When each step began, with the end of the last; and all requests.
        """
        import numpy

        random = numpy.random.default_rng(seed)

        async def run() -> tuple[list[float], list[Timing]]:
            begins, done = [], []
            running: set[asyncio.Task[Timing]] = set()
            for target in steps:
                begins.append(time.perf_counter())
                while (left := begins[-1] + seconds - time.perf_counter()) > 0:
                    for _ in range(target - len(running)):
                        prompt = random.integers(3, vocab_size, input_len).tolist()
                        running.add(asyncio.create_task(self._timed(prompt, new_tokens)))
                    finished, running = await asyncio.wait(
                        running, timeout=left, return_when=asyncio.FIRST_COMPLETED
                    )
                    done += [task.result() for task in finished]
            begins.append(time.perf_counter())
            return begins, done + list(await asyncio.gather(*running))

        return self.loop.run_until_complete(run())

    async def _timed(
        self, prompt: list[int], new_tokens: int, started: Callable[[], None] = lambda: None
    ) -> Timing:
        timing = Timing(time.perf_counter(), [])
        async for chunk in self.stream(**greedy(prompt, new_tokens)):
            timing.chunks.append((time.perf_counter(), chunk["meta_info"]["completion_tokens"]))
            if len(timing.chunks) == 1:
                started()
        if timing.tokens != new_tokens:
            raise RuntimeError(f"{new_tokens} tokens were asked for, {timing.tokens} came")
        return timing


def greedy(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """A request for exactly so many tokens, in few chunks."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "stream_interval": CHUNK_TOKENS,
    }
    return {"input_ids": prompt, "sampling_params": sampling, "stream": True}


class EngineClient(Client):
    """`sglang.Engine` in this process."""

    def __init__(self, spec: Spec) -> None:
        import sglang

        from ..integration.flags import server_args

        self._engine = sglang.Engine(server_args=server_args(**spec.server_arguments()))
        self.loop = self._engine.loop
        self.server_info = self._engine.get_server_info

    async def stream(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        async for chunk in await self._engine.async_generate(**request):
            yield chunk

    async def start_profile(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import ProfileReq

        start = self._engine.tokenizer_manager.start_profile
        if "req" in signature(start).parameters:  # not in 0.5.12.post1
            arguments = {"req": ProfileReq(**arguments)}
        await start(**arguments)


class HttpClient(Client):
    """`sglang serve`, as a user would start it."""

    def __init__(self, spec: Spec) -> None:
        import aiohttp

        arguments = spec.server_arguments()
        self._process = subprocess.Popen(
            [str(Path(sys.executable).with_name("sglang")), "serve", *flags(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        atexit.register(self._end)
        self._url = f"http://127.0.0.1:{arguments['port']}"
        self.loop = asyncio.new_event_loop()

        async def session() -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
            )

        self._session = self.loop.run_until_complete(session())
        self.loop.run_until_complete(self._wait_until_healthy())

    def _end(self) -> None:
        os.killpg(0, signal.SIGKILL)  # this process, `sglang serve` and what that started

    async def _wait_until_healthy(self) -> None:
        import aiohttp

        while self._process.poll() is None:
            try:
                async with self._session.get(f"{self._url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
        raise RuntimeError(f"sglang serve ended with exit code {self._process.returncode}")

    async def stream(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        async with self._session.post(f"{self._url}/generate", json=request) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        async with self._session.request(method, self._url + path, json=body) as response:
            response.raise_for_status()
            return await response.text()

    def server_info(self) -> dict[str, Any]:
        return json.loads(self.loop.run_until_complete(self._ask("GET", "/server_info")))

    async def start_profile(self, arguments: dict[str, Any]) -> None:
        await self._ask("POST", "/start_profile", arguments)


def flags(arguments: dict[str, Any]) -> list[str]:
    """`ServerArgs` by name as command line flags."""
    texts = []
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        texts.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            texts += map(str, value)
        elif value is not True:
            texts.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return texts


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed, here or by SGLang's processes, goes to the log
    spec = Spec(**json.loads(sys.argv[1]))
    client = (HttpClient if spec.through == "serve" else EngineClient)(spec)

    def answer(value: Any) -> None:
        print(json.dumps(value, default=str), file=answers, flush=True)

    answer(client.server_info())
    for line in sys.stdin:
        name, arguments = json.loads(line)
        call: Callable[..., Any] = getattr(client, name)
        answer(call(**arguments))


if __name__ == "__main__":
    main()

"""`fused-fallback check`: says before a start whether this environment and these arguments will do.

It starts no server and loads no weights. The plugin makes the same checks when a server starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..bindings.ops import HEAD_DIMS
from ..kernels.cuda import split_k
from . import plugin, refusals
from .adapters.adapter import Adapter
from .adapters.versions import ADAPTERS, adapter_for
from .flags import FLAG, FallbackArguments, arguments_of
from .symbols import Hook, installed, problems

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

OK, WARN, FAIL = "ok", "warn", "FAIL"
COLOURS = {OK: "32", WARN: "33", FAIL: "31"}
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "flashinfer": ("flashinfer-python",),
    "nvtx": ("nvtx",),
}
"""The distributions in which a package may come."""


@dataclass(frozen=True)
class Line:
    """The outcome of one check.

    Args:
        check: what was checked.
        status: `ok`, `warn` (it starts, but perhaps not as meant) or `FAIL` (it is refused).
        text: what was found; what to do about it unless `ok`.
    """

    check: str
    status: str
    text: str


def refusal(lines: Sequence[Line]) -> str | None:
    """The texts of the red lines in one line, None if there are none."""
    return "; ".join(line.text for line in lines if line.status == FAIL) or None


# ---- without server arguments


def installation() -> Iterator[Line]:
    """SGLang's version, the plugin's entry point, and every symbol that the plugin uses."""
    try:
        adapter_for()
    except PackageNotFoundError:
        known = max(ADAPTERS)
        yield Line("SGLang", FAIL, f"it is not installed: pip install sglang=={known}")
        return
    except ValueError as error:
        yield Line("SGLang", FAIL, str(error))
        return
    release = version("sglang")
    adapters = ADAPTERS[release].values()
    names = " or ".join(adapter.__name__ for adapter in adapters)
    yield Line("SGLang", OK, f"{release}, adapter {names}")
    yield _entry_point()
    used = (symbol for adapter in adapters for symbol in adapter.symbols())
    symbols = tuple(dict.fromkeys((*plugin.SYMBOLS, *used)))
    found = problems(symbols, installed())
    for check, hooked in (("hooks", True), ("symbols", False)):
        texts = [text for symbol, text in found if isinstance(symbol, Hook) == hooked]
        for text in texts:
            text += f": this is not SGLang {release} as released, pip install --force-reinstall "
            yield Line(check, FAIL, f"{text}sglang=={release}")
        if not texts:
            number = sum(isinstance(symbol, Hook) == hooked for symbol in symbols)
            yield Line(check, OK, f"all {number} are there, with the signatures expected")


def _entry_point() -> Line:
    name = "fused_fallback"
    allowed = os.environ.get("SGLANG_PLUGINS")
    if not entry_points(group="sglang.srt.plugins", name=name):
        text = "SGLang does not find it: pip install sglang-fused-fallback for this Python, "
        return Line("plugin", FAIL, text + sys.executable)
    if allowed and name not in [part.strip() for part in allowed.split(",")]:
        text = f"SGLANG_PLUGINS={allowed} leaves it out: add {name}"
        return Line("plugin", FAIL, text)
    return Line("plugin", OK, f"{version('sglang-fused-fallback')}, SGLang finds its entry point")


def host() -> Iterator[Line]:
    """The packages and the GPU."""
    yield Line("packages", OK, ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    if not torch.cuda.is_available():
        text = "no GPU that this torch can use: a CPU shows answers, not speed"
        yield Line("CUDA", WARN, text)
        return
    major, minor = torch.cuda.get_device_capability()
    yield Line(
        "CUDA",
        OK,
        f"{torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()} "
        f"(compute capability {major}.{minor})",
    )


def _version(package: str) -> str:
    for distribution in PACKAGES[package]:
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return "not installed" if find_spec(package) is None else "of unknown version"


# ---- with server arguments


def server(
    adapter: type[Adapter], server_args: ServerArgs, arguments: FallbackArguments
) -> Iterator[Line]:
    """What these server arguments lead to.

    Args:
        adapter: of the installed SGLang.
        server_args: SGLang's record, resolved.
        arguments: the fused fallback's own.
    """
    setting = partial(adapter.setting, server_args)
    reason = refusals.refuse_settings(setting)
    if reason:
        yield Line("settings", FAIL, reason)
        return
    yield Line("settings", OK, "none that is refused")
    yield _worker(adapter, server_args, setting)
    yield _draft(adapter, server_args, setting)
    yield _device(setting)
    yield _attention(setting)
    yield _graphs(setting, adapter.graph_runner.flag)
    yield _threshold(setting, arguments)


def _worker(adapter: type[Adapter], server_args: ServerArgs, setting: Any) -> Line:
    overlap = "off" if setting("disable_overlap_schedule") else "on"
    why = f"--speculative-algorithm EAGLE3 with overlap scheduling {overlap}"
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        selected = SpeculativeAlgorithm.from_string("EAGLE3").create_worker(server_args).__name__
    except Exception as error:  # of whatever SGLang imports
        text = f"SGLang fails to import its worker, {_first_line(error)}: repair that environment"
        return Line("worker", FAIL, text)
    if selected != adapter.worker_class:
        text = f"{why} selects {selected}: only {adapter.worker_class} is supported here"
        return Line("worker", FAIL, text)
    return Line("worker", OK, f"{selected}, by {why}")


def _draft(adapter: type[Adapter], server_args: ServerArgs, setting: Any) -> Line:
    try:
        config = adapter.draft_config(server_args)
    except Exception as error:  # of transformers, huggingface_hub or the file system
        text = "the config.json of --speculative-draft-model-path could not be loaded: "
        text += f"{type(error).__name__}: {_first_line(error)}"
        return Line("draft", FAIL, text)
    reason = refusals.refuse_draft(config)
    if reason:
        return Line("draft", FAIL, reason)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if setting("device") == "cuda" and head_dim not in HEAD_DIMS:
        text = f"the draft's head_dim is {head_dim}: a GPU takes drafts of {HEAD_DIMS}"
        return Line("draft", FAIL, text)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Line(
        "draft",
        OK,
        f"{config.architectures[0]} of one layer, hidden size {config.hidden_size}, {kv_heads} KV "
        f"heads of {head_dim}",
    )


def _device(setting: Any) -> Line:
    device, dtype = setting("device"), setting("dtype")
    if device == "cpu":
        return Line("device", OK, f"cpu, --dtype {dtype}, the draft step in plain torch")
    if not torch.cuda.is_available():
        text = (
            f"torch {torch.__version__} finds no GPU for --device cuda: does nvidia-smi list one, "
        )
        return Line("device", FAIL, text + "and is this a torch built for its driver's CUDA?")
    if dtype in ("float", "float32"):
        text = f"--dtype {dtype} has no fused draft step on a GPU: use bfloat16 or float16"
        return Line("device", FAIL, text)
    if find_spec("triton") is None:
        return Line("device", FAIL, "the draft step needs Triton on a GPU: pip install triton")
    reason = split_k.unavailable(torch.device("cuda"))
    kernels = f"Triton, without the CUDA matmul ({reason})" if reason else "Triton and CUDA"
    return Line("device", OK, f"cuda, --dtype {dtype}, the draft step in {kernels}")


def _attention(setting: Any) -> Line:
    both = setting("attention_backend")
    prefill = setting("prefill_attention_backend") or both
    decode = setting("decode_attention_backend") or both
    draft = setting("speculative_draft_attention_backend") or decode
    if "flashinfer" in (prefill, decode, draft) and find_spec("flashinfer") is None:
        text = "the attention backend is flashinfer: pip install flashinfer-python"
        return Line("attention", FAIL, text)
    return Line(
        "attention",
        OK,
        f"prefill {prefill}, decode {decode}, draft {draft}; KV cache dtype "
        f"{setting('kv_cache_dtype')}, token-major, pages of {setting('page_size')}",
    )


def _graphs(setting: Any, flag: str) -> Line:
    decode = getattr(setting("cuda_graph_config"), "decode", None)
    if setting("disable_cuda_graph") or getattr(decode, "backend", None) == "disabled":
        status = OK if setting("device") == "cpu" else WARN
        return Line("graphs", status, "CUDA graphs are disabled: off steps run eagerly")
    sizes = getattr(decode, "bs", None) or setting("cuda_graph_bs") or [0]
    cap = setting("max_running_requests") or 0
    if max(sizes) < cap:
        text = f"off steps of more than {max(sizes)} requests run eagerly: raise "
        text += f"{flag} to --max-running-requests {cap}"
        return Line("graphs", WARN, text)
    return Line("graphs", OK, f"{len(sizes)} sizes up to {max(sizes)}, at most {cap} requests run")


def _threshold(setting: Any, arguments: FallbackArguments) -> Line:
    warning = refusals.warn_threshold(setting, arguments.threshold)
    if warning:
        text = f"{warning}: raise the latter or lower the former"
        return Line("threshold", WARN, text)
    return Line(
        "threshold",
        OK,
        f"off from {arguments.threshold} running requests, on again at {arguments.resume}; "
        f"at most {setting('max_running_requests')} run",
    )


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if a server would start, 1 if not, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="fused-fallback",
        usage="%(prog)s check [--json] [the arguments of sglang serve]",
        description="Say whether this environment and these server arguments will work, without "
        "starting a server. Without server arguments: the environment alone.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["check"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="a list of {check, status, text}")
    parser.add_argument("--model-type", help=argparse.SUPPRESS)  # sglang serve's own
    options, server_argv = parser.parse_known_args(argv)
    lines = []
    try:
        for line in _lines(server_argv):
            lines.append(line)
            if not options.json:
                print(_formatted(line), flush=True)
    except SystemExit as error:
        if isinstance(error.code, str):  # one of the fused fallback's own, with no usage
            print(error.code, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    return int(refusal(lines) is not None)


def _lines(argv: list[str]) -> Iterator[Line]:
    known = False
    for line in installation():
        known |= line.check == "SGLang" and line.status == OK
        yield line
    yield from host()
    if not argv or not known:
        return
    if not argv[0].startswith("-"):
        argv = ["--model-path", *argv]
    try:
        with _quiet():
            record = _parse(argv)
            given = arguments_of(record)
            if given is None:
                record = _parse([*argv, FLAG])
    except Exception as error:  # what SGLang's own checks raise
        yield Line("arguments", FAIL, f"SGLang refuses them: {_first_line(error)}")
        return
    if given is None:
        text = f"{FLAG} is not given: without it the plugin does nothing; checked as if it were"
        yield Line("flag", WARN, text)
    with _quiet():
        lines = list(server(adapter_for(server_args=record), record, arguments_of(record)))
    yield from lines


def _parse(argv: list[str]) -> ServerArgs:
    """As `sglang serve` does, and with the flags even where SGLang would not load the plugin."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    plugin.register_flags()
    HookRegistry.apply_hooks()
    from sglang.srt.server_args import prepare_server_args

    record = prepare_server_args(argv)
    if hasattr(record, "resolve_once"):
        record.resolve_once()
    return record


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what SGLang tells of an ordinary start away from the lines."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _formatted(line: Line) -> str:
    word = f"{line.status:<4}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        word = f"\033[{COLOURS[line.status]}m{word}\033[0m"
    return f"{word}  {line.check:<9}  {line.text}"


if __name__ == "__main__":
    sys.exit(main())

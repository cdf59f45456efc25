"""NVTX ranges for Nsight: nothing is wrapped, and nothing costs, until one of these is called.

`enable` marks the draft step's stages, for a microbenchmark. `enable_serving` marks a server's
steps; the plugin calls it in every scheduler that starts with FUSED_FALLBACK_PROFILE=nvtx.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import SimpleNamespace
from typing import Any

from torch.profiler import record_function

from ..bindings import ops

STAGES = (
    "capture_aux_hidden_states",
    "build_draft_input",
    "write_draft_kv",
    "fused_draft_step",
)
SERVING = (
    ("off step", "adapter", "_decode_off"),
    ("fused draft step", "fallback", "decode"),
    ("draft KV write", "writer", "_write_block"),
    ("fused draft prefill", "fallback", "prefill"),
    ("catch-up", "adapter", "_draft_extend"),
)
"""Ranges, and whose method each one is."""


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """A range, by NVIDIA's `nvtx` where it is installed, which needs no CUDA build of torch."""
    return _backend()[0](name)


def mark(name: str) -> None:
    """A point in time."""
    _backend()[1](name)


def _backend() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import nvtx
    except ImportError:
        from torch.cuda.nvtx import mark, range

        return range, mark
    return nvtx.annotate, nvtx.mark


def in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` inside an NVTX range of that name, and one of torch's profiler."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with nvtx_range(name), record_function(name):
            return function(*args, **kwargs)

    return wrapped


def enable() -> None:
    """Wrap every backend's stages, as `backend.stage`. Calling it again changes nothing."""
    plain = ops._kernels
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def kernels(backend: str) -> SimpleNamespace:
        module = plain(backend)
        found = {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
        for name in STAGES:
            if name in found:
                found[name] = in_range(f"{backend}.{name}", found[name])
        return SimpleNamespace(**found)

    ops._kernels = kernels


def enable_serving(adapter: Any) -> None:
    """Wrap the methods of SERVING, and mark every flip. Calling it again changes nothing.

    Args:
        adapter: an `integration.adapters.adapter.Adapter`.

    Raises:
        RuntimeError: neither `nvtx` nor a CUDA build of torch is installed.
    """
    if getattr(adapter, "in_ranges", False):
        return
    adapter.in_ranges = True
    mark("fused fallback: ranges on")
    fallback = adapter.fallback
    owners = {"adapter": adapter, "fallback": fallback, "writer": fallback.writer}
    for name, owner, method in SERVING:
        setattr(owners[owner], method, in_range(name, getattr(owners[owner], method)))
    update = adapter.fallback.update

    @wraps(update)
    def marked(num_running: int) -> bool:
        was_off = adapter.fallback.off
        off = update(num_running)
        if off != was_off:
            mark("flip off" if off else "flip on")
        return off

    adapter.fallback.update = marked

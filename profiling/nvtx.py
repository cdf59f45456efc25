"""NVTX ranges around the draft step's stages, for Nsight: nothing is wrapped until `enable()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from ..bindings import ops

STAGES = (
    "capture_aux_hidden_states",
    "build_draft_input",
    "write_draft_kv",
    "fused_draft_step",
)


def in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` inside an NVTX range of that name."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.nvtx.range(name):
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

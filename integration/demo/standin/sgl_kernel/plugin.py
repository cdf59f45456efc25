"""SGLang plugin of the stand-in: what SGLang itself still needs on a CPU, besides the operators.

On 0.5.12.post1 that is an EAGLE path (`triton_release.py`). On later versions slot look-ups for KV
pages of more than one token go through torch instead of Triton; on 0.5.17 so does the page
allocator, and two faults in its CPU attention are repaired.
SGLang finds the plugin through the `.dist-info` folder beside this package, so it is active in
every SGLang process that has the stand-in on PYTHONPATH (unless SGLANG_PLUGINS leaves it out).
"""

import copy
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from .cache import spans

_BACKEND = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
_FALLBACK = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"


def register() -> None:
    """Registers the hooks that the installed SGLang needs."""
    if version("sglang").startswith("0.5.12"):
        from . import triton_release

        triton_release.register()
        return
    from sglang.srt.mem_cache import allocation
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"{allocation.__name__}.get_last_loc", allocation.get_last_loc_torch, HookType.REPLACE
    )
    if not version("sglang").startswith("0.5.17"):
        return
    HookRegistry.register(_FALLBACK, keep_intel_amx, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}.forward_extend", forward_extend, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}.forward_decode", forward_decode, HookType.AROUND)

    from sglang.srt.mem_cache.allocator import paged

    # HookRegistry wraps functions only; these are Triton kernels, launched as kernel[grid](...)
    paged.alloc_extend_kernel = Launcher(allocate_extend)
    paged.alloc_decode_kernel = Launcher(allocate_decode)


def keep_intel_amx(original: Callable[..., dict], view: Any) -> dict:
    """Keeps `intel_amx`, the one CPU backend that EAGLE accepts, on a processor without AMX."""
    return {} if view.attention_backend == "intel_amx" else original(view)


# 0.5.17 prepares the lengths of a verify or draft-decode pass and then overwrites them with
# forward_batch.seq_lens, the committed lengths; 0.5.23 has dropped that line.


def forward_extend(
    original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """`forward_extend` with the prepared lengths."""
    batch = _with_seq_lens(batch, backend.extend_metadata[0])
    return original(backend, q, k, v, layer, batch, *args, **kwargs)


def forward_decode(
    original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """`forward_decode` with the prepared lengths, where a draft backend has prepared some."""
    if backend.draft_decode_metadata is not None:
        batch = _with_seq_lens(batch, backend.draft_decode_metadata[1])
    return original(backend, q, k, v, layer, batch, *args, **kwargs)


def _with_seq_lens(batch: Any, seq_lens: Any) -> Any:
    batch = copy.copy(batch)
    batch.seq_lens = seq_lens
    return batch


class Launcher:
    """A function in the place of a Triton kernel: takes a grid, ignores it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.function


def allocate_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Writes the slots of positions [prefix_lens, seq_lens) of each request, end to end.

    A request first fills the page of its slot `last_loc`, then takes its share of `free_pages` in
    order. With too few pages nothing is written: the allocator then reports that it is full.
    """
    held_pages = (prefix_lens + page_size - 1) // page_size
    taken_pages = (seq_lens + page_size - 1) // page_size - held_pages
    if int(taken_pages.sum()) > free_pages.numel():
        return
    request, position = spans(prefix_lens, seq_lens - prefix_lens)
    page = position // page_size - held_pages[request]
    slots = last_loc[request] + 1 + position - prefix_lens[request]
    new = page >= 0
    first_page = (taken_pages.cumsum(0) - taken_pages)[request]
    slots[new] = free_pages[(first_page + page)[new]] * page_size + position[new] % page_size
    out_indices.copy_(slots)


def allocate_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Writes the slot of each request's last position."""
    allocate_extend(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size)

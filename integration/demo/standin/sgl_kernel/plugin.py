"""SGLang plugin of the stand-in: repairs 0.5.17's CPU attention, inert on other versions.

SGLang finds it through the `.dist-info` folder beside this package, so it is active in every SGLang
process that has the stand-in on PYTHONPATH (and no SGLANG_PLUGINS list without `cpu_standin`).
"""

import copy
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

_BACKEND = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
_FALLBACK = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"


def register() -> None:
    """Registers the hooks for SGLang 0.5.17 and its post-releases."""
    if version("sglang").split(".post")[0] != "0.5.17":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_FALLBACK, keep_intel_amx, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}.forward_extend", forward_extend, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}.forward_decode", forward_decode, HookType.AROUND)


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

"""CUDA graphs of the target's plain decode with its aux hidden states, beside the verify graphs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from ..fallback import FusedFallback
from ..symbols import Attributes, Call, Symbol

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerNames:
    """What a release calls its graph runner of decode steps.

    Args:
        attribute: the model runner's attribute that holds it.
        target: the dotted path of its class.
        flag: the server flag for its largest batch.
    """

    attribute: str
    target: str
    flag: str


DECODE_RUNNER = RunnerNames(
    attribute="decode_cuda_graph_runner",
    target="sglang.srt.model_executor.runner.DecodeCudaGraphRunner",
    flag="--cuda-graph-max-bs-decode",
)
CUDA_RUNNER = RunnerNames(  # 0.5.12.post1
    attribute="graph_runner",
    target="sglang.srt.model_executor.cuda_graph_runner.CudaGraphRunner",
    flag="--cuda-graph-max-bs",
)


def _symbols(names: RunnerNames) -> tuple[Symbol, ...]:
    model_runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    return (
        Attributes(
            model_runner,
            f"{names.attribute} attn_backend spec_algorithm device gpu_id",
        ),
        Call(f"{model_runner}._get_attention_backend"),
        Attributes("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", "size"),
        Call(
            f"{names.target}.__init__",
            "model_runner",
            "attn_backend speculative_num_steps speculative_num_draft_tokens",
        ),
        Call(f"{names.target}.get_spec_info", "num_tokens"),
        Attributes(names.target, "capture_bs capture_hidden_mode"),
        Attributes("sglang.srt.speculative.spec_info.SpeculativeAlgorithm", "NONE"),
        Call("sglang.srt.utils.get_available_gpu_memory", "device gpu_id"),
    )


SYMBOLS = _symbols(DECODE_RUNNER)
SYMBOLS_OF_0512 = _symbols(CUDA_RUNNER)


@dataclass(frozen=True)
class DecodeGraphs:
    """What an off step replays, and the attention backend whose buffers those graphs hold.

    Args:
        runner: SGLang's graph runner, captured for one token a request.
        attn_backend: its own attention backend: a second `init_cuda_graph_state` on the target's
            would move the buffers under the captured verify graphs.
        summary: sizes, memory and time, for the log.
        attribute: where the model runner holds its graph runner.
    """

    runner: Any
    attn_backend: Any
    summary: str
    attribute: str

    @contextlib.contextmanager
    def in_place_of_verify(self, model_runner: Any) -> Iterator[None]:
        """Let the target run its plain decode inside the block."""
        with swapped(
            model_runner,
            attn_backend=self.attn_backend or model_runner.attn_backend,
            **{self.attribute: self.runner},
        ):
            yield


def capture(model_runner: Any, fallback: FusedFallback, names: RunnerNames) -> DecodeGraphs:
    """Capture the plain decode of the target, and the writes of the draft's KV.

    Sizes are those that SGLang captures for a server without speculation. Where capture fails, off
    mode runs eagerly and a warning says why.

    Args:
        model_runner: the target's, after SGLang captured its own graphs.
        fallback: whose writer captures its graphs.
        names: of this release.
    """
    eager = DecodeGraphs(None, None, "eager, no CUDA graphs", names.attribute)
    if getattr(model_runner, names.attribute) is None:
        return eager
    from sglang.srt.utils import get_available_gpu_memory

    def free_gb() -> float:
        return get_available_gpu_memory(model_runner.device, model_runner.gpu_id)

    began, free = time.monotonic(), free_gb()
    try:
        runner, attn_backend = _capture_plain_decode(model_runner, names)
        fallback.writer.capture()
    except Exception as error:  # out of memory comes as several types, SGLang's own among them
        logger.warning("fused fallback: off mode runs eagerly, its capture failed: %s", error)
        return eager
    largest, cap = max(runner.capture_bs), model_runner.req_to_token_pool.size
    if largest < cap:
        logger.warning(
            "fused fallback: off steps of more than %d requests run eagerly: raise "
            "%s to --max-running-requests %d",
            largest,
            names.flag,
            cap,
        )
    return DecodeGraphs(
        runner=runner,
        attn_backend=attn_backend,
        summary=(
            f"{len(runner.capture_bs)} graphs up to {largest} requests, {free - free_gb():.2f} GB, "
            f"{fallback.writer.memory_bytes / 1e9:.2f} GB for writing the draft's KV, "
            f"{time.monotonic() - began:.1f} s"
        ),
        attribute=names.attribute,
    )


def _capture_plain_decode(model_runner: Any, names: RunnerNames) -> tuple[Any, Any]:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    class PlainDecodeGraphRunner(resolve_name(names.target)):
        def get_spec_info(self, num_tokens: int) -> None:
            self.capture_hidden_mode = CaptureHiddenMode.FULL

    # It shares the workspace that all backends of this process share: they run one after another.
    attn_backend = model_runner._get_attention_backend()
    with swapped(
        model_runner,
        spec_algorithm=SpeculativeAlgorithm.NONE,  # decode mode, one token a request
        attn_backend=attn_backend,
        **{names.attribute: None},
    ):
        runner = PlainDecodeGraphRunner(
            model_runner,
            attn_backend=attn_backend,
            speculative_num_steps=0,
            speculative_num_draft_tokens=1,
        )
    return runner, attn_backend


@contextlib.contextmanager
def swapped(obj: Any, **values: Any) -> Iterator[None]:
    """Set attributes inside the block, and put the old ones back."""
    before = {name: getattr(obj, name) for name in values}
    for name, value in values.items():
        setattr(obj, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(obj, name, value)


def without_triton_draft_extend(drafter: Any) -> contextlib.AbstractContextManager[None]:
    """Run 0.5.12.post1's draft extend eagerly inside the block, where its attention is Triton's.

    Its graph takes the same number of rows for every request's and lets each see all of them: in
    spec v1 a request attends to another's KV, in spec v2 to rows that are not real. Later releases
    have this right, and so has the eager path of the same backend.

    Args:
        drafter: the worker that holds the draft extend's graphs.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if isinstance(drafter.draft_extend_attn_backend, TritonAttnBackend):
        return swapped(drafter, cuda_graph_runner_for_draft_extend=None)
    return contextlib.nullcontext()


def draft_extend_symbols(drafter: str) -> tuple[Symbol, ...]:
    """What `without_triton_draft_extend` uses, of the worker with that dotted path."""
    backend = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
    return (
        Attributes(drafter, "draft_extend_attn_backend cuda_graph_runner_for_draft_extend"),
        Call(f"{backend}.init_forward_metadata", "forward_batch"),
    )

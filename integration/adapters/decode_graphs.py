"""CUDA graphs of the target's plain decode with its aux hidden states, beside the verify graphs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...bindings.graph import DraftStepGraphRunner
from ..fallback import FusedFallback
from ..symbols import Attributes, Call, Symbol

logger = logging.getLogger(__name__)

MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
RUNNER = "sglang.srt.model_executor.runner.DecodeCudaGraphRunner"
SYMBOLS: tuple[Symbol, ...] = (
    Attributes(
        MODEL_RUNNER,
        "decode_cuda_graph_runner attn_backend spec_algorithm init_new_workspace device gpu_id",
    ),
    Call(f"{MODEL_RUNNER}._get_attention_backend", keywords="init_new_workspace"),
    Attributes("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", "size"),
    Call(
        f"{RUNNER}.__init__",
        "model_runner",
        "attn_backend speculative_num_steps speculative_num_draft_tokens",
    ),
    Call(f"{RUNNER}.get_spec_info", "num_tokens"),
    Attributes(RUNNER, "capture_bs capture_hidden_mode"),
    Attributes("sglang.srt.speculative.spec_info.SpeculativeAlgorithm", "NONE"),
    Call("sglang.srt.utils.get_available_gpu_memory", "device gpu_id"),
)


@dataclass(frozen=True)
class DecodeGraphs:
    """What an off step replays, and the attention backend whose buffers those graphs hold.

    Args:
        runner: SGLang's `DecodeCudaGraphRunner`, captured for one token a request.
        attn_backend: its own attention backend: a second `init_cuda_graph_state` on the target's
            would move the buffers under the captured verify graphs.
        summary: sizes, memory and time, for the log.
    """

    runner: Any
    attn_backend: Any
    summary: str

    @contextlib.contextmanager
    def in_place_of_verify(self, model_runner: Any) -> Iterator[None]:
        """Let the target run its plain decode inside the block."""
        with _swapped(
            model_runner,
            decode_cuda_graph_runner=self.runner,
            attn_backend=self.attn_backend or model_runner.attn_backend,
        ):
            yield


EAGER = DecodeGraphs(runner=None, attn_backend=None, summary="eager, no CUDA graphs")


def capture(model_runner: Any, fallback: FusedFallback) -> DecodeGraphs:
    """Capture the plain decode of the target, and the fused draft step into `fallback`.

    Sizes are those that SGLang captures for a server without speculation. Where capture fails, off
    mode runs eagerly and a warning says why.

    Args:
        model_runner: the target's, after SGLang captured its own graphs.
        fallback: gets the graphs of the draft step.
    """
    if model_runner.decode_cuda_graph_runner is None:
        return EAGER
    from sglang.srt.utils import get_available_gpu_memory

    def free_gb() -> float:
        return get_available_gpu_memory(model_runner.device, model_runner.gpu_id)

    began, free = time.monotonic(), free_gb()
    try:
        runner, attn_backend = _capture_plain_decode(model_runner)
        decode_gb = free - free_gb()
        fallback.graphs = DraftStepGraphRunner(
            layer=fallback.layer,
            batch_sizes=runner.capture_bs,
            kept_hidden_states=fallback.kept_hidden_states,
            with_input_embeds=fallback.layer.embed_tokens is None,
            **fallback.pool.as_kwargs(),
        )
    except Exception as error:  # out of memory comes as several types, SGLang's own among them
        logger.warning("fused fallback: off mode runs eagerly, its capture failed: %s", error)
        fallback.graphs = None
        return EAGER
    largest, cap = max(runner.capture_bs), model_runner.req_to_token_pool.size
    if largest < cap:
        logger.warning(
            "fused fallback: off steps of more than %d requests run eagerly: raise "
            "--cuda-graph-max-bs-decode to --max-running-requests %d",
            largest,
            cap,
        )
    return DecodeGraphs(
        runner=runner,
        attn_backend=attn_backend,
        summary=(
            f"{len(runner.capture_bs)} graphs up to {largest} requests, plain decode "
            f"{decode_gb:.2f} GB, draft step {fallback.graphs.memory_bytes / 1e9:.2f} GB, "
            f"{time.monotonic() - began:.1f} s"
        ),
    )


def _capture_plain_decode(model_runner: Any) -> tuple[Any, Any]:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    class PlainDecodeCudaGraphRunner(DecodeCudaGraphRunner):
        def get_spec_info(self, num_tokens: int) -> None:
            self.capture_hidden_mode = CaptureHiddenMode.FULL

    with _swapped(model_runner, init_new_workspace=model_runner.init_new_workspace):
        attn_backend = model_runner._get_attention_backend(init_new_workspace=True)
    with _swapped(
        model_runner,
        spec_algorithm=SpeculativeAlgorithm.NONE,  # decode mode, one token a request
        attn_backend=attn_backend,
        decode_cuda_graph_runner=None,
    ):
        runner = PlainDecodeCudaGraphRunner(
            model_runner,
            attn_backend=attn_backend,
            speculative_num_steps=0,
            speculative_num_draft_tokens=1,
        )
    return runner, attn_backend


@contextlib.contextmanager
def _swapped(obj: Any, **values: Any) -> Iterator[None]:
    """Set attributes inside the block, and put the old ones back."""
    before = {name: getattr(obj, name) for name in values}
    for name, value in values.items():
        setattr(obj, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(obj, name, value)

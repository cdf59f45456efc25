"""CUDA graphs of the fused draft step: static buffers, one graph a batch size, padding by slot -1.

A replay copies its batch into the static buffers on the current stream and runs the graph on a
stream of its own, beside the small kernels that prepare the target's next step. Whoever reads or
writes the draft's KV or the kept hidden states next calls `join` first.

There is no graph on the CPU: the caller runs `ops.fused_draft_step` eagerly there, and also for a
batch larger than the largest captured size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from ..kernels.draft_layer import DraftLayer
from ..kernels.triton.off_step import stage
from . import ops


class DraftStepGraphRunner:
    """Captures `fused_draft_step` for given batch sizes and replays any batch that fits.

    The sizes are captured from the largest down in one memory pool, as SGLang does. A batch of n
    rows replays the next size up; rows from n on get slot -1 and write nothing. `replay` neither
    allocates nor synchronises with the host.

    Attributes:
        bonus_tokens: [largest size] int32, of the last step, after `join`.
        new_seq_lens: [largest size] in `seq_lens_dtype`, likewise.
        memory_bytes: device memory that the static buffers and the graphs took.
    """

    def __init__(
        self,
        *,
        layer: DraftLayer,
        batch_sizes: Sequence[int],
        kept_hidden_states: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        with_input_embeds: bool = False,
        seq_lens_dtype: torch.dtype = torch.int64,
        backend: str = "auto",
    ) -> None:
        """Allocate the static buffers and capture every size.

        Args:
            layer: the draft layer's weights, on a GPU.
            batch_sizes: sizes to capture; any order, duplicates are dropped.
            kept_hidden_states, k_buffer, v_buffer: what the step writes, at fixed addresses.
            k_scale, v_scale: as in `ops.write_draft_kv`.
            with_input_embeds: whether `replay` is given embeddings ([rows, H]).
            seq_lens_dtype: of the new lengths; int64 or int32.
            backend: as in `ops.fused_draft_step`.

        Raises:
            ValueError: not on a GPU, no sizes, or the op does not take these tensors.
        """
        device = k_buffer.device
        if device.type != "cuda":
            raise ValueError(f"k_buffer must be on a GPU to capture graphs, got {device}")
        self.batch_sizes = sorted(set(batch_sizes))
        if not self.batch_sizes or self.batch_sizes[0] < 1:
            raise ValueError(f"batch_sizes must be positive and not empty, got {batch_sizes}")
        free_before = _free_bytes(device)
        rows, dtype = self.batch_sizes[-1], layer.dtype
        num_aux, width = layer.num_aux_hidden_states, layer.target_hidden_size

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._aux = zeros((rows, num_aux * width), dtype)
        self._embeds = zeros((rows, layer.hidden_size), dtype) if with_input_embeds else None
        self._tokens = zeros((rows,), torch.int64)
        self._seq_lens = zeros((rows,), seq_lens_dtype)
        self._requests = zeros((rows,), torch.int64)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.bonus_tokens = zeros((rows,), torch.int32)
        self.new_seq_lens = zeros((rows,), seq_lens_dtype)
        self._step = {
            "layer": layer,
            "kept_hidden_states": kept_hidden_states,
            "k_buffer": k_buffer,
            "v_buffer": v_buffer,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "backend": backend,
        }
        # Streams of another priority come from another pool than SGLang's, all of the default one:
        # on a stream that is also the target's, both graphs would hold the same cuBLAS workspace.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._done = torch.cuda.Event()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.batch_sizes):
            self._graphs[size] = self._capture(size, pool)
        self.memory_bytes = max(0, free_before - _free_bytes(device))

    def can_replay(self, num_rows: int) -> bool:
        """Whether a batch of that many rows fits the largest captured size."""
        return num_rows <= self.batch_sizes[-1]

    def replay(
        self,
        *,
        aux_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> None:
        """Run the step. Arguments are those of `ops.fused_draft_step`, the aux states packed.

        What follows on the current stream may overwrite them.

        Raises:
            ValueError: more rows than the largest captured size, or embeddings where the runner
                was built without them, or none where with.
        """
        n = next_token_ids.shape[0]
        if not self.can_replay(n):
            raise ValueError(f"{n} rows exceed the largest captured size {self.batch_sizes[-1]}")
        if (input_embeds is None) != (self._embeds is None):
            raise ValueError(
                f"the runner was built with{'out' if self._embeds is None else ''} input_embeds, "
                f"got {'none' if input_embeds is None else 'some'}"
            )
        size = self.batch_sizes[bisect_left(self.batch_sizes, n)]
        self.join()  # the last step may still read the buffers
        stage(
            size=size,
            given=(aux_hidden_states, next_token_ids, seq_lens, req_pool_indices, out_cache_loc),
            staged=(self._aux, self._tokens, self._seq_lens, self._requests, self._slots),
        )
        if self._embeds is not None:
            self._embeds[:n].copy_(input_embeds)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._graphs[size].replay()
            self._done.record()

    def join(self) -> None:
        """Make the current stream wait for the last step; the host does not wait."""
        self._done.wait()

    def _capture(self, size: int, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
        def step() -> None:
            ops.fused_draft_step(
                aux_hidden_states=self._aux[:size],
                next_token_ids=self._tokens[:size],
                seq_lens=self._seq_lens[:size],
                req_pool_indices=self._requests[:size],
                out_cache_loc=self._slots[:size],
                bonus_tokens=self.bonus_tokens[:size],
                new_seq_lens=self.new_seq_lens[:size],
                input_embeds=None if self._embeds is None else self._embeds[:size],
                **self._step,
            )

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # every slot is -1: the warm-up writes nothing
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            step()
        return graph


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]

"""CUDA graphs of the fused draft step: static buffers, two graphs a batch size, padding by slot -1.

`begin` runs what needs the aux hidden states alone, while the target's sampler runs; `finish` what
needs the sampled tokens, while the next step is prepared. Both work on a stream of their own.
Whoever reads or writes the draft's KV or the kept hidden states next calls `join` first.

There is no graph on the CPU: the caller runs `ops.fused_draft_step` eagerly there, and also for a
batch larger than the largest captured size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from ..kernels.draft_layer import DraftLayer
from ..kernels.triton import draft_step
from ..kernels.triton.off_step import stage
from . import ops


class DraftStepGraphRunner:
    """Captures the draft step's halves for given batch sizes and replays any batch that fits.

    The sizes are captured from the largest down in one memory pool, as SGLang does. A batch of n
    rows replays the next size up; rows from n on get slot -1 and write nothing. Neither half
    allocates or synchronises with the host.

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
        packed_aux: bool = True,
        with_input_embeds: bool = False,
        seq_lens_dtype: torch.dtype = torch.int64,
    ) -> None:
        """Allocate the static buffers and capture every size.

        Args:
            layer: the draft layer's weights, on a GPU.
            batch_sizes: sizes to capture; any order, duplicates are dropped.
            kept_hidden_states, k_buffer, v_buffer: what the step writes, at fixed addresses.
            k_scale, v_scale: as in `ops.write_draft_kv`.
            packed_aux: whether `begin` is given one packed tensor or a list of `num_aux`.
            with_input_embeds: whether `finish` is given embeddings ([rows, H]).
            seq_lens_dtype: of the new lengths; int64 or int32.

        Raises:
            ValueError: not on a GPU, no sizes, or the Triton kernels do not take these tensors.
        """
        device = k_buffer.device
        if device.type != "cuda":
            raise ValueError(f"k_buffer must be on a GPU to capture graphs, got {device}")
        self.batch_sizes = sorted(set(batch_sizes))
        if not self.batch_sizes or self.batch_sizes[0] < 1:
            raise ValueError(f"batch_sizes must be positive and not empty, got {batch_sizes}")
        reason = ops.can_fuse(layer=layer, k_buffer=k_buffer, v_buffer=v_buffer, backend="triton")
        if reason:
            raise ValueError(f"backend 'triton' does not support this draft: {reason}")
        free_before = _free_bytes(device)
        rows, dtype = self.batch_sizes[-1], layer.dtype
        num_aux, width = layer.num_aux_hidden_states, layer.target_hidden_size

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        shapes = [(rows, num_aux * width)] if packed_aux else [(rows, width)] * num_aux
        self._aux = [zeros(shape, dtype) for shape in shapes]
        self._embeds = zeros((rows, layer.hidden_size), dtype) if with_input_embeds else None
        self._tokens = zeros((rows,), torch.int64)
        self._seq_lens = zeros((rows,), seq_lens_dtype)
        self._requests = zeros((rows,), torch.int64)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.bonus_tokens = zeros((rows,), torch.int32)
        self.new_seq_lens = zeros((rows,), seq_lens_dtype)
        self._x = zeros((rows, 2 * layer.hidden_size), dtype)
        self._layer = layer
        self._kept = kept_hidden_states
        self._pool = {
            "k_buffer": k_buffer,
            "v_buffer": v_buffer,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        # Streams of another priority come from another pool than SGLang's, all of the default one:
        # on a stream that is also the target's, both graphs would hold the same cuBLAS workspace.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._staged, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.batch_sizes):
            self._graphs[size] = self._capture(size, pool)
        self.memory_bytes = max(0, free_before - _free_bytes(device))

    def can_replay(self, num_rows: int) -> bool:
        """Whether a batch of that many rows fits the largest captured size."""
        return num_rows <= self.batch_sizes[-1]

    def begin(
        self,
        *,
        aux_hidden_states: torch.Tensor | Sequence[torch.Tensor],
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> None:
        """Start a step: keep the aux hidden states and project them.

        Arguments are those of `ops.fused_draft_step`; they must stay as they are until `finish`.

        Raises:
            ValueError: more rows than the largest captured size, or another number of aux tensors
                than the runner was built for.
        """
        n = out_cache_loc.shape[0]
        if not self.can_replay(n):
            raise ValueError(f"{n} rows exceed the largest captured size {self.batch_sizes[-1]}")
        packed = isinstance(aux_hidden_states, torch.Tensor)
        aux = [aux_hidden_states] if packed else aux_hidden_states
        if len(aux) != len(self._aux):
            raise ValueError(
                f"the runner was built for {len(self._aux)} aux tensors, got {len(aux)}"
            )
        size = self._size(n)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for wide, staged_wide in zip(aux, self._aux, strict=True):
                stage(
                    size=size,
                    first=req_pool_indices,
                    staged_first=self._requests,
                    second=out_cache_loc,
                    staged_second=self._slots,
                    wide=wide,
                    staged_wide=staged_wide,
                )
            self._staged.record()
            self._graphs[size][0].replay()

    def finish(
        self,
        *,
        next_token_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> None:
        """Write the K and V of the step that `begin` started.

        Arguments are those of `ops.fused_draft_step`. What follows on the current stream may
        overwrite them, and those of `begin`.

        Raises:
            ValueError: embeddings where the runner was built without them, or none where with.
        """
        if (input_embeds is None) != (self._embeds is None):
            raise ValueError(
                f"the runner was built with{'out' if self._embeds is None else ''} input_embeds, "
                f"got {'none' if input_embeds is None else 'some'}"
            )
        size = self._size(next_token_ids.shape[0])
        self.join()  # the last step may still read these buffers
        self._staged.wait()
        stage(
            size=size,
            first=next_token_ids,
            staged_first=self._tokens,
            second=seq_lens,
            staged_second=self._seq_lens,
            wide=input_embeds,
            staged_wide=self._embeds,
        )
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._graphs[size][1].replay()
            self._done.record()

    def join(self) -> None:
        """Make the current stream wait for the last step; the host does not wait."""
        self._done.wait()

    def _size(self, num_rows: int) -> int:
        return self.batch_sizes[bisect_left(self.batch_sizes, num_rows)]

    def _capture(
        self, size: int, pool: tuple[int, int]
    ) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        slots, x = self._slots[:size], self._x[:size]

        def project() -> None:
            aux = [buffer[:size] for buffer in self._aux]
            draft_step.project(
                layer=self._layer,
                aux_hidden_states=aux[0] if len(aux) == 1 else aux,
                out_cache_loc=slots,
                req_pool_indices=self._requests[:size],
                kept_hidden_states=self._kept,
                x=x,
            )

        def write() -> None:
            draft_step.write_projected(
                layer=self._layer,
                x=x,
                token_ids=self._tokens[:size],
                positions=self._seq_lens[:size],
                out_cache_loc=slots,
                bonus_tokens=self.bonus_tokens[:size],
                new_seq_lens=self.new_seq_lens[:size],
                input_embeds=None if self._embeds is None else self._embeds[:size],
                **self._pool,
            )

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # every slot is -1: the warm-up writes nothing
            project()
            write()
        torch.cuda.current_stream().wait_stream(self._stream)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph, half in zip(graphs, (project, write), strict=True):
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                half()
        return graphs


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]

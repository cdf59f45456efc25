"""CUDA graphs of the fused draft step: static buffers, one graph a batch size, padding by slot -1.

A step is staged once its tokens are known. A small one runs at once, on a stream of its own, beside
the small kernels that prepare the target's next step. A large one waits and runs as a branch of the
target's next graph (`beside`); where something else comes first, it runs alone. Whoever reads or
writes the draft's KV or the kept hidden states calls `write` first.

There is no graph on the CPU: the caller runs `ops.fused_draft_step` eagerly there, and also for a
batch larger than the largest captured size.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch

from ..kernels.draft_layer import DraftLayer
from ..kernels.triton.off_step import stage
from . import ops

# Rows from which a step runs beside the target's. On an H200 a branch in graphs of fewer rows,
# whose kernels are short, costs more than it saves
# (profiling/results/off_step_variants_h200_0.5.17.json).
BESIDE_FROM = 64


class DraftStepGraphRunner:
    """Captures `fused_draft_step` for given batch sizes and writes any batch that fits.

    The sizes are captured from the largest down in one memory pool, as SGLang does. A batch of n
    rows takes the next size up; rows from n on get slot -1 and write nothing. Nothing here
    allocates or synchronises with the host once it is captured.

    Attributes:
        bonus_tokens: [largest size] int32, of the last step written.
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
        beside_from: int = BESIDE_FROM,
    ) -> None:
        """Allocate the static buffers and capture every size.

        Args:
            layer: the draft layer's weights, on a GPU.
            batch_sizes: sizes to capture; any order, duplicates are dropped.
            kept_hidden_states, k_buffer, v_buffer: what the step writes, at fixed addresses.
            k_scale, v_scale: as in `ops.write_draft_kv`.
            with_input_embeds: whether `stage` is given embeddings ([rows, H]).
            seq_lens_dtype: of the new lengths; int64 or int32.
            backend: as in `ops.fused_draft_step`.
            beside_from: the size from which a step waits for a graph captured in `beside`.

        Raises:
            ValueError: not on a GPU, no sizes, or the op does not take these tensors.
        """
        device = k_buffer.device
        if device.type != "cuda":
            raise ValueError(f"k_buffer must be on a GPU to capture graphs, got {device}")
        self.batch_sizes = sorted(set(batch_sizes))
        if not self.batch_sizes or self.batch_sizes[0] < 1:
            raise ValueError(f"batch_sizes must be positive and not empty, got {batch_sizes}")
        self._beside_from = beside_from
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
        self._options = {
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
        # One for all graphs: torch keeps memory that was freed on a stream for that stream.
        self._branch = torch.cuda.Stream(device)
        self._staged, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._given: tuple[torch.Tensor | None, ...] = ()  # what is staged on `_stream`
        self._running = False  # whether a step may still run there
        self._waiting = 0  # rows that are staged and wait to be written
        self._padded = 0  # rows whose slots may be other than -1
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.batch_sizes):
            self._graphs[size] = self._capture(size, pool)
        self.memory_bytes = max(0, free_before - _free_bytes(device))

    def fits(self, num_rows: int) -> bool:
        """Whether a batch of that many rows fits the largest captured size."""
        return num_rows <= self.batch_sizes[-1]

    def stage(
        self,
        *,
        aux_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        out_cache_loc: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> None:
        """Take a step, to be written at once on another stream or later.

        Arguments are those of `ops.fused_draft_step`, the aux states packed. The aux states stay as
        they are until `before_replay` or `write`; whatever else is given may be overwritten, and
        freed, by what follows on the current stream after one of these.

        Raises:
            ValueError: more rows than the largest captured size, or embeddings where the runner
                was built without them, or none where with.
        """
        n = next_token_ids.shape[0]
        if not self.fits(n):
            raise ValueError(f"{n} rows exceed the largest captured size {self.batch_sizes[-1]}")
        if (input_embeds is None) != (self._embeds is None):
            raise ValueError(
                f"the runner was built with{'out' if self._embeds is None else ''} input_embeds, "
                f"got {'none' if input_embeds is None else 'some'}"
            )
        self._release()
        given = (aux_hidden_states, next_token_ids, seq_lens, req_pool_indices, out_cache_loc)
        staged = (self._aux, self._tokens, self._seq_lens, self._requests, self._slots)
        size = self._padded = self._size(n)

        def stage_here() -> None:
            stage(size=size, given=given, staged=staged)
            if self._embeds is not None:
                self._embeds[:n].copy_(input_embeds)

        if size >= self._beside_from:
            self.write()
            stage_here()
            self._waiting = n
            return
        if self._waiting:
            self.write()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            stage_here()
            self._staged.record()
            self._graphs[size].replay()
            self._done.record()
        self._given, self._running = (*given, input_embeds), True

    def write(self) -> None:
        """See that the last step is written before what follows on the current stream."""
        if self._running:
            self._done.wait()
            self._given, self._running = (), False
        if self._waiting:
            self._graphs[self._size(self._waiting)].replay()
            self._waiting = 0

    @contextlib.contextmanager
    def beside(self, size: int) -> Iterator[None]:
        """Write the first `size` staged rows beside what the block launches on the current stream.

        For the capture of a graph of which every replay follows a call of `before_replay`. Sizes
        below `beside_from` are left alone.
        """
        if size < self._beside_from:
            yield
            return
        main = torch.cuda.current_stream()
        if self._branch == main:  # torch's streams come round again
            self._branch = torch.cuda.Stream(main.device)
        self._branch.wait_stream(main)
        with torch.cuda.stream(self._branch):
            self._step(size)
        yield
        main.wait_stream(self._branch)

    def before_replay(self, size: int) -> None:
        """Prepare for a graph captured in `beside(size)`, and for new aux hidden states.

        The graph writes the step that waits, if that fits. It writes none a second time: slots of
        rows written before may be others' by now.
        """
        self._release()
        has_branch = size >= self._beside_from
        if self._waiting and not (has_branch and self._waiting <= size <= self._padded):
            self.write()
        if has_branch and self._padded and not self._waiting:
            self.write()
            self._slots.fill_(-1)
            self._padded = 0
        self._waiting = 0

    def _release(self) -> None:
        """Let what was given to the last step be overwritten and freed."""
        if self._given:
            self._staged.wait()
            self._given = ()

    def _size(self, num_rows: int) -> int:
        return self.batch_sizes[bisect_left(self.batch_sizes, num_rows)]

    def _step(self, size: int) -> None:
        ops.fused_draft_step(
            aux_hidden_states=self._aux[:size],
            next_token_ids=self._tokens[:size],
            seq_lens=self._seq_lens[:size],
            req_pool_indices=self._requests[:size],
            out_cache_loc=self._slots[:size],
            bonus_tokens=self.bonus_tokens[:size],
            new_seq_lens=self.new_seq_lens[:size],
            input_embeds=None if self._embeds is None else self._embeds[:size],
            **self._options,
        )

    def _capture(self, size: int, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # every slot is -1: the warm-up writes nothing
            self._step(size)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            self._step(size)
        return graph


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]

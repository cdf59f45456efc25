"""Decode steps wait here, and one CUDA graph writes a block of them into the draft's KV.

The draft's weights are read once a block instead of once a step: a write of 512 rows takes some
110 us on an H200 where one of 8 rows takes 40 (profiling/results/draft_step_h200.json). Between two
target graphs remains one small kernel, which copies the step's rows here. Whoever reads or writes
the draft's KV next calls `write` first.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from ..kernels.draft_layer import DraftLayer
from . import ops
from .off_step import stage

# Rows of a block. More hardly lower the time a row: 512 are bound by the matmuls' FLOPs.
MAX_ROWS = 512
LEAST_ROWS = 8  # of a graph: fewer take as long, since the time goes into reading the weights


class DraftKVWriter:
    """Keeps the rows of decode steps, and writes their K and V together.

    Works without graphs, on a CPU too; `capture` adds them.

    Attributes:
        max_rows: rows of a block.
        num_rows: rows that wait.
        memory_bytes: device memory of the static buffers and of the graphs.
    """

    def __init__(
        self,
        *,
        layer: DraftLayer,
        kept_hidden_states: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        max_rows: int = MAX_ROWS,
        backend: str = "auto",
    ) -> None:
        """Allocate the static buffers.

        Args:
            layer: the draft layer's weights. Without `embed_tokens`, `stage` is given embeddings.
            kept_hidden_states: [max_requests, num_aux * H_target], written by `stage`.
            k_buffer, v_buffer, k_scale, v_scale, backend: as in `ops.write_draft_kv`.
            max_rows: rows of a block.

        Raises:
            ValueError: `max_rows` is not positive.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows must be positive, got {max_rows}")
        self.max_rows, self.num_rows = max_rows, 0
        self.kept_hidden_states = kept_hidden_states
        device = k_buffer.device

        def indices(fill: int) -> torch.Tensor:
            return torch.full((max_rows,), fill, dtype=torch.int64, device=device)

        width = layer.num_aux_hidden_states * layer.target_hidden_size
        self._rows = {
            "aux_hidden_states": layer.hidden_norm.new_zeros(max_rows, width),
            "token_ids": indices(0),
            "positions": indices(0),
            "out_cache_loc": indices(-1),  # of rows from `num_rows` on: padding
        }
        if layer.embed_tokens is None:
            embeds = layer.hidden_norm.new_zeros(max_rows, layer.hidden_size)
            self._rows["input_embeds"] = embeds
        self._options = {
            "layer": layer,
            "k_buffer": k_buffer,
            "v_buffer": v_buffer,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "backend": backend,
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.memory_bytes = sum(tensor.nbytes for tensor in self._rows.values())

    @property
    def sizes(self) -> list[int]:
        """Rows of the graphs, ascending: powers of two, and a block."""
        doublings = range(LEAST_ROWS.bit_length() - 1, (self.max_rows - 1).bit_length())
        return [*(1 << i for i in doublings), self.max_rows]

    def capture(self) -> None:
        """Capture the write of every size, the largest first, in one memory pool.

        Raises:
            RuntimeError: rows wait. And whatever a capture raises; writes stay eager then.
        """
        if self.num_rows:
            raise RuntimeError(f"{self.num_rows} rows wait: call write before capture")
        device = self._options["k_buffer"].device
        free, pool, graphs = _free_bytes(device), torch.cuda.graph_pool_handle(), {}
        for size in reversed(self.sizes):
            self._write(size)  # every slot is -1: nothing is written
            graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[size], pool=pool):
                self._write(size)
        self._graphs = graphs
        self.memory_bytes += max(0, free - _free_bytes(device))

    def takes(self, num_rows: int) -> bool:
        """Whether a step of that many rows fits into a block."""
        return num_rows <= self.max_rows

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
        """Take a step of one row a request: keep its aux states, and its rows for the next write.

        What waits is written first where the block is full. A row that waits for a slot given here
        will not be written: its request has left, and the slot is another's now.

        Args: as in `ops.fused_draft_step`, the aux states packed. They may be overwritten or freed
            by what follows on the current stream.

        Raises:
            ValueError: more rows than a block has, arguments of different lengths, or embeddings
                where the layer has a table, or none where it has none.
        """
        num_rows = req_pool_indices.shape[0]
        if not self.takes(num_rows):
            raise ValueError(f"{num_rows} rows exceed max_rows {self.max_rows}")
        if (input_embeds is None) == ("input_embeds" in self._rows):
            got = "none" if input_embeds is None else "some"
            table = "no embedding table" if input_embeds is None else "an embedding table"
            raise ValueError(f"the layer has {table}, got {got} for input_embeds")
        if self.num_rows + num_rows > self.max_rows:
            self.write()
        given = {
            "aux_hidden_states": aux_hidden_states,
            "token_ids": next_token_ids,
            "positions": seq_lens,
            "out_cache_loc": out_cache_loc,
        }
        if input_embeds is not None:
            given["input_embeds"] = input_embeds
        stage(
            given=given,
            staged=self._rows,
            at=self.num_rows,
            req_pool_indices=req_pool_indices,
            kept_hidden_states=self.kept_hidden_states,
        )
        self.num_rows += num_rows

    def write(self) -> None:
        """Write every row that waits, before what follows on the current stream.

        With graphs nothing allocates, and nothing synchronises with the host.
        """
        if self.num_rows:
            self._write_block()

    def _write_block(self) -> None:
        if self._graphs:
            self._graphs[self.sizes[bisect_left(self.sizes, self.num_rows)]].replay()
        else:
            self._write(self.num_rows)
        self._rows["out_cache_loc"].fill_(-1)
        self.num_rows = 0

    def _write(self, size: int) -> None:
        rows = {name: tensor[:size] for name, tensor in self._rows.items()}
        ops.write_draft_kv(**rows, **self._options)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]

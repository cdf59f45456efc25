"""Into how many shares of K a matmul for few rows is split, in Triton and in CUDA."""

from __future__ import annotations

MAX_SPLITS = 32  # arbitrary; the sums are read back this many times


def num_splits(*, weight_tiles: int, steps: int, multiprocessors: int) -> int:
    """As many blocks as run at once, one a multiprocessor, and no share without a step.

    Args:
        weight_tiles: tiles of weight rows.
        steps: along K, of a tile.
    """
    return max(1, min(multiprocessors // weight_tiles, steps, MAX_SPLITS))

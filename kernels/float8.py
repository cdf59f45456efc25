"""What this torch writes for a float8_e4m3fn overflow; the kernels write the same bytes."""

from __future__ import annotations

import torch

# 448, the largest value, since torch 2.13 or so; NaN before.
E4M3_OVERFLOW: int = int(torch.tensor([1000.0]).to(torch.float8_e4m3fn).view(torch.uint8))

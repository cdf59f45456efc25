"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

A kernel launched with `launch_pdl=True` may start once every program of the one before has called
`start_next`, and sees what that one wrote only after `wait_for_previous`. Both cost nothing in a
kernel launched without it. Every kernel here waits before it ends, so that one that has waited can
rely on all kernels before.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()

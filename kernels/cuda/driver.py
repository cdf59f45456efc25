"""Compile for sm_90a, describe tensors to the copy engine, launch: what cupy does not offer.

cupy's own compile step names the target sm_90, which lacks wgmma, so NVRTC is called for sm_90a and
the machine code handed to `cupy.RawModule`. Its launch takes no struct by value as large as three
of the copy engine's tensor maps, so `cuLaunchKernelEx` is called through ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import cupy
import torch

from .split_k import BOX_K

SOURCES = ("primitives.cuh", "wgmma.cuh", "split_k.cu")

_DEPENDENT = 6  # CUlaunchAttributeID, programmatic stream serialization
_ELEMENT_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_128B, _PROMOTE_256B = 3, 2, 3


class TensorMap(ctypes.Structure):
    """A `CUtensorMap`: opaque, 64-byte aligned in the kernel's parameters."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call} failed with {status}: {(text.value or b'unknown').decode()}")


Macros = tuple[tuple[str, int], ...]


@cache
def _source() -> str:
    folder = Path(__file__).parent
    return "\n".join((folder / file).read_text() for file in SOURCES)


def _options(macros: Macros) -> tuple[str, ...]:
    return ("-arch=sm_90a", "-std=c++17", *(f"-D{name}={value}" for name, value in macros))


def compile_cubin(macros: Macros, *further: str) -> tuple[bytes, str]:
    """Machine code of the kernels built with these macros, and the compiler's log; needs no GPU.

    Args:
        further: options of NVRTC's.

    Raises:
        RuntimeError: they do not compile; the text is the log.
    """
    program = cupy.cuda.nvrtc.createProgram(_source(), SOURCES[-1], (), ())
    try:
        cupy.cuda.nvrtc.compileProgram(program, (*_options(macros), *further))
    except cupy.cuda.nvrtc.NVRTCError as error:
        raise RuntimeError(cupy.cuda.nvrtc.getProgramLog(program)) from error
    return cupy.cuda.nvrtc.getCUBIN(program), cupy.cuda.nvrtc.getProgramLog(program)


@cache
def load_kernel(name: str, macros: Macros, shared_bytes: int, device: int) -> Any:
    """The kernel `name` built with these macros, from cupy's cache folder if it is there.

    `device` is the current device's index: a loaded kernel belongs to one.
    """
    built_from = (_source(), _options(macros), cupy.cuda.nvrtc.getVersion())
    key = hashlib.sha256(repr(built_from).encode()).hexdigest()
    cache = os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"
    cubin = Path(cache).expanduser() / f"fused_fallback_{key}.cubin"
    if not cubin.exists():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        partial = cubin.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(compile_cubin(macros)[0])
        partial.rename(cubin)
    kernel = cupy.RawModule(path=str(cubin)).get_function(name)
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    row_stride: int,
    box_rows: int,
    weights: bool,
) -> TensorMap:
    """A row-major matrix cut into boxes of `box_rows` x 64 elements, 128-byte swizzled.

    Weights are promoted to 256-byte fetches: the next box lies beside this one.
    """
    memory = (ctypes.c_uint64 * 24)()  # room to align: the driver writes to 64-byte boundaries
    aligned = -(-ctypes.addressof(memory) // 64) * 64
    status = _cuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _ELEMENT_TYPES[dtype],
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(row_stride * dtype.itemsize),
        (ctypes.c_uint32 * 2)(BOX_K, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128B,
        _PROMOTE_256B if weights else _PROMOTE_128B,
        0,
    )
    _check(status, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


def map_of(tensor: torch.Tensor, box_rows: int, weights: bool = False) -> TensorMap:
    """`tensor_map` of a 2-d tensor with contiguous columns."""
    rows, columns = tensor.shape
    return tensor_map(
        tensor.data_ptr(), tensor.dtype, rows, columns, tensor.stride(0), box_rows, weights
    )


def launch(
    kernel: Any,
    params: ctypes.Structure,
    *,
    grid: int,
    block: int,
    shared_bytes: int,
    dependent: bool = False,
) -> None:
    """Launch on torch's current stream with one parameter passed by value.

    Args:
        dependent: start once every block of the kernel before allows it, or has ended.
    """
    attribute = _Attribute(_DEPENDENT, 0, (ctypes.c_uint32 * 16)(int(dependent)))
    config = _LaunchConfig(
        grid=(grid, 1, 1),
        block=(block, 1, 1),
        shared_bytes=shared_bytes,
        stream=torch.cuda.current_stream().cuda_stream,
        attributes=ctypes.pointer(attribute),
        num_attributes=1,
    )
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    status = _cuda().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(kernel.kernel.ptr), arguments, None
    )
    _check(status, "cuLaunchKernelEx")

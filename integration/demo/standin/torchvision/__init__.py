"""Loads the installed torchvision where its compiled operators do not fit the installed torch.

PyPI's torchvision is a CUDA build; with a CPU build of torch its library does not load, and
importing it then fails on the missing schema of `torchvision::nms`. SGLang and transformers only
import names from it, so schemas without an implementation are enough. Where the library loads,
nothing is changed.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent.parent
_path = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("torchvision", _path)
if _spec is None or _spec.loader is None or _spec.origin is None:
    raise ModuleNotFoundError("torchvision is not installed (pip install --no-deps torchvision)")
try:
    torch.ops.load_library(str(Path(_spec.origin).with_name("_C.so")))
except OSError:
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
_module = importlib.util.module_from_spec(_spec)
sys.modules["torchvision"] = _module
_spec.loader.exec_module(_module)

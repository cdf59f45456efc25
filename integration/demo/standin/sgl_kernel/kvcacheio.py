"""Copies between host and device KV pools, which SGLang 0.5.12.post1 imports even without any.

They belong to the hierarchical cache; calling one raises NotImplementedError.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.startswith("transfer_kv"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not in the CPU stand-in")

    return refuse

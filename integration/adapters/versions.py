"""The one table of supported SGLang releases: version, worker, adapter."""

from __future__ import annotations

from importlib.metadata import version

from .eagle_worker_v2 import EagleWorkerV2, EagleWorkerV2Of0517

ADAPTERS: dict[str, type[EagleWorkerV2]] = {
    "0.5.23": EagleWorkerV2,
    "0.5.17": EagleWorkerV2Of0517,
}


def adapter_for(sglang_version: str | None = None) -> type[EagleWorkerV2]:
    """The adapter class of an SGLang release, the installed one by default.

    Raises:
        ValueError: the release is not in the table.
    """
    sglang_version = sglang_version or version("sglang")
    if sglang_version not in ADAPTERS:
        known = ", ".join(sorted(ADAPTERS))
        raise ValueError(f"SGLang {sglang_version} is not known to it; install one of {known}")
    return ADAPTERS[sglang_version]

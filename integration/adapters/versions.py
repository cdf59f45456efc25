"""The one table of what is supported: SGLang release, worker, adapter."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from .adapter import Adapter
from .eagle_worker_v1 import EagleWorkerV1
from .eagle_worker_v2 import EagleWorkerV2, EagleWorkerV2Of0512, EagleWorkerV2Of0517

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ADAPTERS: dict[str, dict[str, type[Adapter]]] = {
    "0.5.23": {"EAGLEWorkerV2": EagleWorkerV2},
    "0.5.17": {"EAGLEWorkerV2": EagleWorkerV2Of0517},
    "0.5.12.post1": {"EAGLEWorkerV2": EagleWorkerV2Of0512, "EAGLEWorker": EagleWorkerV1},
}


def adapter_for(
    sglang_version: str | None = None, *, server_args: ServerArgs | None = None
) -> type[Adapter]:
    """The adapter class of an SGLang release, the installed one by default.

    Args:
        sglang_version: a release.
        server_args: where a release has a worker for overlap scheduling and one without, these
            tell which will run; by default the former.

    Raises:
        ValueError: the release is not in the table.
    """
    sglang_version = sglang_version or version("sglang")
    if sglang_version not in ADAPTERS:
        known = ", ".join(sorted(ADAPTERS))
        raise ValueError(f"SGLang {sglang_version} is not known to it; install one of {known}")
    workers = ADAPTERS[sglang_version]
    overlapped, plain = workers["EAGLEWorkerV2"], workers.get("EAGLEWorker")
    if plain and server_args and plain.setting(server_args, "disable_overlap_schedule"):
        return plain
    return overlapped

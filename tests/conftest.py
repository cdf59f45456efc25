"""Skips what this environment cannot run, with the reason."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

NEEDS_SGLANG = (
    "test_server.py",
    "test_flags_in_sglang.py",
    "test_check.py",
    "test_real_server.py",
    "test_gpu_server.py",
    "test_draft_variants.py",
)


def pytest_ignore_collect(collection_path, config: pytest.Config) -> bool | None:
    if collection_path.name in NEEDS_SGLANG and importlib.util.find_spec("sglang") is None:
        return True
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes on a CPU, where it needs SLOW_TESTS=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("SLOW_TESTS"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="minutes on a CPU: set SLOW_TESTS=1"))

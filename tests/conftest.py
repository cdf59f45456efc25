"""Skips what this environment cannot run, with the reason."""

from __future__ import annotations

import importlib.util

import pytest

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

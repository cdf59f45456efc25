"""Installs kernels/, bindings/, integration/ and profiling/ as `fused_fallback.*` (a namespace)."""

from pathlib import Path

from setuptools import setup

FOLDERS = ("kernels", "bindings", "integration", "profiling")
SUBPACKAGES = (
    "kernels.triton",
    "kernels.cuda",
    "integration.adapters",
    "integration.demo",
)

setup(
    name="sglang-fused-fallback",
    version="0.1.0",
    description="Speculative decoding that SGLang switches off under load and back on warm",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[f"fused_fallback.{name}" for name in (*FOLDERS, *SUBPACKAGES)],
    package_dir={f"fused_fallback.{name}": name for name in FOLDERS},
    package_data={
        "fused_fallback.kernels.cuda": ["*.cu", "*.cuh"],
        "fused_fallback.profiling": ["*.sh", "prompts/*.jsonl"],
    },
    # torch, triton and sglang are the host's own: a pin here would fight SGLang's.
    extras_require={
        "cuda": ["cupy-cuda13x>=14.2", "nvtx>=0.2.11"],
        "test": ["pytest>=8", "pytest-benchmark>=5", "ruff==0.14.6"],
    },
    entry_points={
        "console_scripts": ["fused-fallback = fused_fallback.integration.check:main"],
        "sglang.srt.plugins": ["fused_fallback = fused_fallback.integration.plugin:register"],
    },
)

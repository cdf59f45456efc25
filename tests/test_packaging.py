"""The folders install as `fused_fallback.*` and never shadow another package."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
names = ["kernels", "profiling", "bindings", "integration"]
parts = [name + part for name, part in zip(names, [".reference", ".timing", ".ops", ".flags"])]
from importlib.util import find_spec
found = {name: find_spec("fused_fallback." + name).origin for name in parts}
import kernels, profiling
found["kernels"], found["profiling"] = kernels.__file__, profiling.__file__
import fused_fallback
found["namespace"] = fused_fallback.__file__
from importlib.metadata import entry_points, version
(plugin,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "fused_fallback"]
found["plugin"], found["version"] = plugin.value, version("sglang-fused-fallback")
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["regular", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the project and other packages named `kernels`, `profiling`."""
    venv = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    editable = ["--editable"] if request.param == "editable" else []
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", *editable, ROOT],
        check=True,
        timeout=300,
    )
    (site,) = venv.glob("lib/python*/site-packages")
    for name in ("kernels", "profiling"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("")
    return venv


def test_nothing_is_shadowed_even_in_the_clone(installed: Path) -> None:
    output = subprocess.run(
        [installed / "bin" / "python", "-c", PROGRAM, ROOT],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout
    found = json.loads(output)
    assert found["kernels"].startswith(str(installed))
    assert found["profiling"].startswith(str(installed))
    assert found["namespace"] is None
    assert found["plugin"] == "fused_fallback.integration.plugin:register"
    assert found["version"] == "0.1.0"
    assert found["kernels.reference"].endswith("kernels/reference.py")


def test_the_wheel_holds_the_sources_and_nothing_else_at_top_level(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "fused_fallback",
        "sglang_fused_fallback-0.1.0.dist-info",
    }
    sources = {
        f"fused_fallback/{path.relative_to(ROOT)}"
        for folder in ("kernels", "bindings", "integration", "profiling")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cu", ".cuh") and "standin" not in path.parts
    }
    assert sources <= set(names)

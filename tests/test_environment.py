"""Settings per SGLang version and device, and when an environment is made anew."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from fused_fallback.integration.demo import environment as environments
from fused_fallback.integration.demo.environment import Environment, SetupError, create

PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+]+")


@pytest.fixture
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Real commands that take no time: a virtual environment without pip, then what is appended."""
    further: list[list[str]] = []

    def steps(version: str, device: str, directory: Path) -> list[tuple[str, list[str]]]:
        venv = [sys.executable, "-m", "venv", "--without-pip", str(directory)]
        return [("venv", venv), *(("further step", command) for command in further)]

    monkeypatch.setattr(environments, "_steps", steps)
    return further


def _create(directory: Path, **options: object) -> tuple[Environment, list[str]]:
    lines: list[str] = []
    return create("0.5.23", directory, device="cpu", progress=lines.append, **options), lines


def test_made_once(tmp_path: Path, quick_steps: list[list[str]]) -> None:
    environment, lines = _create(tmp_path / "env")
    assert environment.python == tmp_path / "env" / "bin" / "python"
    assert environment.python.exists()
    assert any("[1/1] venv" in line for line in lines)
    witness = tmp_path / "env" / "witness"
    witness.touch()

    started = time.monotonic()
    again, lines = _create(tmp_path / "env")

    assert time.monotonic() - started < 1
    assert again == environment and witness.exists()
    assert lines == [f"SGLang 0.5.23 (cpu) is ready in {tmp_path / 'env'}"]


def test_made_anew_when_requirements_change(
    tmp_path: Path, quick_steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "tools.txt").write_text("six==1.16.0\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", requirements)
    _create(tmp_path / "env")
    witness = tmp_path / "env" / "witness"
    witness.touch()
    (requirements / "tools.txt").write_text("six==1.17.0\n")

    environment, _ = _create(tmp_path / "env")

    assert not witness.exists() and environment.python.exists()


def test_made_anew_after_a_failure_whose_last_lines_are_shown(
    tmp_path: Path, quick_steps: list[list[str]]
) -> None:
    failure = "print('\\n'.join(f'line {i}' for i in range(40))); raise SystemExit(3)"
    quick_steps.append([sys.executable, "-c", failure])
    with pytest.raises(SetupError) as caught:
        _create(tmp_path / "env")
    message = str(caught.value)
    assert message.startswith("[2/2] further step failed with exit code 3: ")
    assert "line 39" in message and "line 25" in message and "line 24" not in message
    witness = tmp_path / "env" / "witness"
    witness.touch()

    quick_steps.clear()
    environment, lines = _create(tmp_path / "env")

    assert any("[1/1] venv" in line for line in lines)
    assert not witness.exists() and environment.python.exists()


def test_a_folder_of_someone_else_is_left_alone(
    tmp_path: Path, quick_steps: list[list[str]]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SetupError, match=re.escape(str(tmp_path))):
        _create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_unknown_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"0\.5\.17, 0\.5\.12\.post1, got '0\.5\.99'"):
        create("0.5.99", tmp_path)
    with pytest.raises(ValueError, match="got 'tpu'"):
        create("0.5.23", tmp_path, device="tpu")
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(SetupError, match=r"Python 3\.11 or newer"):
        create("0.5.23", tmp_path)


def test_running_interpreter_is_taken_only_with_that_version(
    tmp_path: Path, quick_steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "running_sglang", lambda: "0.5.23")
    environment, _ = _create(tmp_path / "env", use_running=True)
    assert environment == Environment("0.5.23", "cpu", Path(sys.executable))
    assert not (tmp_path / "env").exists()
    monkeypatch.setattr(environments, "running_sglang", lambda: "0.5.17")
    environment, _ = _create(tmp_path / "env", use_running=True)
    assert environment.python == tmp_path / "env" / "bin" / "python"


@pytest.mark.parametrize("version", environments.VERSIONS)
def test_steps(version: str, tmp_path: Path) -> None:
    cpu, cuda = (
        [command for _, command in environments._steps(version, device, tmp_path)]
        for device in ("cpu", "cuda")
    )
    assert [command for command in cpu if f"sglang=={version}" in command] == [cpu[2]]
    assert "--no-deps" in cpu[2] and environments.TORCHVISION in cpu[2]
    assert str(environments.REQUIREMENTS / f"sglang-{version}-cpu.txt") in cpu[1]
    assert f"sglang=={version}" in cuda[1] and "--no-deps" not in cuda[1]
    assert ("kernels<0.15" in cuda[1]) == (version == "0.5.12.post1")
    for command in (cpu[-1], cuda[-1]):
        assert command[-3:] == ["--no-deps", "-e", str(environments.REPOSITORY)]


def test_every_requirement_is_pinned() -> None:
    files = {path.name: path.read_text().splitlines() for path in _requirement_files()}
    assert {f"sglang-{version}-cpu.txt" for version in environments.VERSIONS} < set(files)
    for name, lines in files.items():
        pins = [line for line in lines if line and not line.startswith(("#", "-r "))]
        assert pins and all(PIN.fullmatch(pin) for pin in pins), name
        names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
        assert len(set(names)) == len(names), name
        for line in lines:
            if line.startswith("-r "):
                assert line.removeprefix("-r ") in files


def _requirement_files() -> list[Path]:
    return sorted(environments.REQUIREMENTS.glob("*.txt"))


def test_cpu_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    variables = Environment("0.5.23", "cpu", Path("/venv/bin/python")).env()
    assert variables["PYTHONPATH"] == f"{environments.STANDIN}{os.pathsep}/elsewhere"
    assert (environments.STANDIN / "sgl_kernel" / "__init__.py").exists()
    assert variables["PATH"].split(os.pathsep)[0] == "/venv/bin"
    assert variables["SGLANG_USE_CPU_ENGINE"] == variables["TORCHDYNAMO_DISABLE"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "7", "the caller's choice"


def test_gpu_variables_and_options_are_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    environment = Environment("0.5.23", "cuda", Path("/venv/bin/python"))
    variables = environment.env()
    assert not variables.keys() & {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE"}
    assert environment.server_options() == {} and environment.server_arguments() == []


@pytest.mark.parametrize("version", environments.VERSIONS)
def test_cpu_server_arguments(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    environment = Environment(version, "cpu", Path("/venv/bin/python"))
    arguments = environment.server_arguments(max_total_tokens=4096)
    pairs = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    assert pairs["--device"] == "cpu"
    backend = "triton" if version == "0.5.12.post1" else "intel_amx"
    assert pairs["--prefill-attention-backend"] == pairs["--decode-attention-backend"] == backend
    assert ("TRITON_INTERPRET" in environment.env()) == (backend == "triton")
    assert pairs["--dtype"] == "float32"
    assert pairs["--max-total-tokens"] == "4096"
    assert pairs["--disable-overlap-schedule"].startswith("--"), "a flag without a value"

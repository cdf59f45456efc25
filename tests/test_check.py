"""`fused-fallback check` on the installed SGLang, and on copies of it that differ in one place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from fused_fallback.integration import check, plugin, symbols
from fused_fallback.integration.adapters import versions
from fused_fallback.integration.adapters.versions import ADAPTERS, adapter_for
from fused_fallback.integration.symbols import Attributes, Call, Hook, problems
from sglang_server import PAIR, TRITON_RELEASE
from test_real_server import FALLBACK, FLAG, SERVE, START_TIMEOUT_S, command

CHECKS_OF_THE_INSTALLATION = ["SGLang", "plugin", "hooks", "symbols", "packages", "CUDA"]
CHECKS = [
    *CHECKS_OF_THE_INSTALLATION,
    *("settings", "worker", "draft", "device", "attention", "graphs", "threshold"),
]
METRICS = "srt/managers/scheduler_components/metrics_reporter.py"
if TRITON_RELEASE:
    METRICS = "srt/observability/scheduler_metrics_mixin.py"
EAGLE_WORKER = "srt/speculative/eagle_worker_v2.py"
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the last line of each check."""
    code = check.main(["check", "--json", *argv])
    return code, {line["check"]: line for line in json.loads(capsys.readouterr().out)}


def serve(*extra: str) -> list[str]:
    """The arguments of a small speculative server, after `sglang serve`."""
    return command((), *extra)


# ---- an environment and arguments that work


def test_the_shipped_pair_passes_in_time() -> None:
    program = [sys.executable, "-m", "fused_fallback.integration.check", "check"]
    began = time.monotonic()
    ended = subprocess.run([*program, *serve(*FALLBACK)], capture_output=True, text=True)
    assert time.monotonic() - began < 40  # 15 s where nothing else runs
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.split(maxsplit=2) for line in ended.stdout.splitlines()]
    assert [check for _, check, _ in lines] == CHECKS
    assert "FAIL" not in ended.stdout and "\033" not in ended.stdout
    texts = {check: text for _, check, text in lines}
    assert texts["SGLang"].startswith(version("sglang"))
    assert texts["worker"].startswith("EAGLEWorkerV2, by --speculative-algorithm EAGLE3")
    assert texts["draft"] == (
        "LlamaForCausalLMEagle3 of one layer, hidden size 256, 2 KV heads of 64"
    )
    assert texts["threshold"] == "off from 3 running requests, on again at 1; at most 48 run"


def test_json_schema(capsys: Capture) -> None:
    assert check.main(["check", *serve(*FALLBACK), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["check"] for line in lines] == CHECKS
    for line in lines:
        assert list(line) == ["check", "status", "text"]
        assert line["status"] in ("ok", "warn", "FAIL") and line["text"]


def test_without_arguments_the_environment_alone(capsys: Capture) -> None:
    code, lines = run(capsys)
    assert code == 0
    assert list(lines) == CHECKS_OF_THE_INSTALLATION
    assert f"torch {version('torch')}" in lines["packages"]["text"]


def test_positional_model_path_and_config_file(capsys: Capture, tmp_path: Path) -> None:
    _, model_path, *others, without_graphs = serve()
    given = {others[i].removeprefix("--"): others[i + 1] for i in range(0, len(others), 2)}
    given |= {FLAG[2:]: True, f"{FLAG[2:]}-threshold": 7}
    config = tmp_path / "server.yaml"
    config.write_text(json.dumps(given))
    code, lines = run(capsys, model_path, "--config", str(config), without_graphs)
    assert code == 0, lines
    assert lines["threshold"]["text"].startswith("off from 7 running requests, on again at 5")


def test_without_the_flag_it_says_so(capsys: Capture) -> None:
    code, lines = run(capsys, *serve())
    assert code == 0
    assert lines["flag"]["status"] == "warn"
    assert FLAG in lines["flag"]["text"]
    assert "at most 128 run" in lines["threshold"]["text"]  # as with the flag


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_colour_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, variable: str, coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    line = check.Line("draft", check.FAIL, "why")
    assert check._formatted(line) == "FAIL  draft      why"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert ("\033[31mFAIL\033[0m" in check._formatted(line)) == coloured


# ---- arguments that do not


def test_a_refused_setting_is_the_launcher_s_own_text(capsys: Capture) -> None:
    code, lines = run(capsys, *serve(*FALLBACK, "--pp-size", "2"))
    assert code == 1
    assert lines["settings"] == {
        "check": "settings",
        "status": "FAIL",
        "text": "pipeline parallelism is not supported: set --pp-size 1, got 2",
    }


def test_a_threshold_above_the_cap(capsys: Capture) -> None:
    threshold = (FLAG, f"{FLAG}-threshold", "64", "--max-running-requests", "20")
    code, lines = run(capsys, *serve(*threshold))
    assert code == 0
    assert lines["threshold"]["status"] == "warn"
    assert "threshold 64 is above --max-running-requests 20" in lines["threshold"]["text"]


def test_a_draft_that_is_not_supported(capsys: Capture, tmp_path: Path) -> None:
    config = json.loads((PAIR / "draft" / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = serve(*FALLBACK, "--speculative-draft-model-path", str(tmp_path))
    code, lines = run(capsys, *argv)
    assert code == 1
    assert lines["draft"]["status"] == "FAIL"
    assert "the draft has 2 layers" in lines["draft"]["text"]


def test_arguments_that_sglang_refuses(capsys: Capture, tmp_path: Path) -> None:
    code, lines = run(capsys, str(tmp_path / "nothing"), *serve(*FALLBACK)[2:])
    assert code == 1
    assert lines["arguments"]["status"] == "FAIL"
    assert "SGLang refuses them" in lines["arguments"]["text"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        ([f"{FLAG}-threshold", "4"], f"{FLAG}-threshold needs {FLAG} as well"),
        ([FLAG, f"{FLAG}-threshold", "many"], "invalid int value: 'many'"),
    ],
)
def test_bad_arguments_end_with_2(capsys: Capture, argv: list[str], message: str) -> None:
    assert check.main(["check", *serve(*argv)]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_command_ends_with_2() -> None:
    with pytest.raises(SystemExit) as ended:
        check.main(["chekc"])
    assert ended.value.code == 2


# ---- environments that do not


def test_a_release_that_is_not_in_the_table(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "ADAPTERS", {"0.4.0": adapter_for()})
    code, lines = run(capsys, *serve(*FALLBACK))
    assert code == 1
    assert lines["SGLang"]["text"] == (
        f"SGLang {version('sglang')} is not known to it; install one of 0.4.0"
    )
    assert list(lines) == ["SGLang", "packages", "CUDA"]


def test_no_sglang(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: version("no-such-distribution"))
    code, lines = run(capsys, *serve(*FALLBACK))
    assert code == 1
    assert "it is not installed: pip install sglang==0.5." in lines["SGLang"]["text"]


def test_a_plugin_that_sglang_leaves_out(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    code, lines = run(capsys)
    assert code == 1
    assert lines["plugin"]["status"] == "FAIL"
    assert "add fused_fallback" in lines["plugin"]["text"]


def test_another_worker_than_the_adapter_s(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_for(), "worker_class", "EAGLEWorker")
    code, lines = run(capsys, *serve(*FALLBACK))
    assert code == 1
    assert "selects EAGLEWorkerV2: only EAGLEWorker is supported" in lines["worker"]["text"]


# ---- an SGLang that differs from the one the adapter was written for


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with an SGLang of links to the installed one's files."""
    (location,) = find_spec("sglang").submodule_search_locations
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(location, tmp_path / "sglang", copy_function=os.symlink, ignore=without_caches)
    return tmp_path


def change(copy: Path, file: str, old: str, new: str | None) -> None:
    """Replace text in one file of the copy; remove the file where there is no new text."""
    path = copy / "sglang" / file
    text = path.read_text()
    assert old in text
    path.unlink()
    if new is not None:
        path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "line", "named"),
    [
        (
            EAGLE_WORKER,
            "def _draft_extend_for_decode(",
            "def _draft_extend_for_verify(",
            "symbols",
            "EagleDraftWorker._draft_extend_for_decode does not exist",
        ),
        (
            EAGLE_WORKER,
            "target_hidden_states: torch.Tensor",
            "hidden_states: torch.Tensor",
            "hooks",
            "EagleDraftWorker._draft_extend_for_prefill takes (self, batch: ",
        ),
        (
            "srt/managers/schedule_batch.py",
            "has_grammar",
            "with_grammar",
            "symbols",
            "Batch has no has_grammar",
        ),
        (
            METRICS,
            "",
            None,
            "hooks",
            ".update_spec_metrics does not exist",
        ),
    ],
)
def test_a_change_is_named(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    copy: Path,
    file: str,
    old: str,
    new: str | None,
    line: str,
    named: str,
) -> None:
    change(copy, file, old, new)
    monkeypatch.setattr(check, "installed", lambda: copy)
    assert check.main(["check"]) == 1
    output = capsys.readouterr().out.splitlines()
    red = [text for text in output if text.startswith("FAIL")]
    assert any(text.split()[1] == line and named in text for text in red), red
    assert all(f"pip install --force-reinstall sglang=={version('sglang')}" in t for t in red)


def test_an_unchanged_copy_passes(monkeypatch: pytest.MonkeyPatch, copy: Path) -> None:
    monkeypatch.setattr(check, "installed", lambda: copy)
    assert check.main(["check"]) == 0


@pytest.mark.skipif(version("sglang") != "0.5.23", reason="the same on every release")
def test_a_server_refuses_to_start_on_a_changed_sglang(copy: Path) -> None:
    """It says why in its last line, and loads nothing."""
    change(copy, EAGLE_WORKER, "def _draft_extend_for_decode(", "def _draft_extend_for_verify(")
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        command(SERVE, *FALLBACK),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert ended.returncode != 0
    last = ended.stderr.rstrip().splitlines()[-1]
    assert last.startswith("fused fallback: off: sglang.srt.speculative.eagle_worker_v2.")
    assert "_draft_extend_for_decode does not exist" in last
    assert "Load weight" not in ended.stderr + ended.stdout


def test_every_hook_is_declared() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    for adapter in ADAPTERS[version("sglang")].values():
        plugin.register_worker(adapter)
    registered = {
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(source and source.plugin_name == "fused_fallback" for _, _, source in hooks)
    }
    adapters = ADAPTERS[version("sglang")].values()
    declared = (*plugin.SYMBOLS, *(s for adapter in adapters for s in adapter.symbols()))
    assert registered == {symbol.target for symbol in declared if isinstance(symbol, Hook)}


# ---- how a symbol is found and compared

BASE = """
class Pool:
    size: int
    def __init__(self):
        self.buffer, self._hidden = local, 1
        self.register_buffer("cache", 2)
        local = 3
    def get(self, layer_id, *, scale=None): ...
"""
DERIVED = """
from ..base import Pool as Pool
if True:
    from ..base import *
class Pool(Pool):
    extra = 1
    def call(self, batch, plan=None, *, mode, **kwargs): ...
    @staticmethod
    def plain(first, second): ...
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "p" / "sub").mkdir(parents=True)
    (tmp_path / "p" / "__init__.py").touch()
    (tmp_path / "p" / "base.py").write_text(BASE)
    (tmp_path / "p" / "sub" / "__init__.py").write_text("from .derived import *")
    (tmp_path / "p" / "sub" / "derived.py").write_text(DERIVED)
    return tmp_path


@pytest.mark.parametrize(
    "symbol",
    [
        Attributes("p.sub.Pool", "extra call size buffer _hidden cache get"),
        Call("p.sub.derived.Pool.get", "layer_id", "scale"),
        Call("p.sub.Pool.call", "batch", "mode anything"),
        Hook("p.sub.Pool.call", "batch plan"),
        Hook("p.sub.Pool.call"),
        Call("p.sub.Pool.plain", "first second"),
    ],
)
def test_a_symbol_that_fits(package: Path, symbol: symbols.Symbol) -> None:
    assert problems([symbol], package) == []


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        (Attributes("p.sub.Pool", "size local"), "p.sub.Pool has no local"),
        (Attributes("p.sub.Tool", "size"), "p.sub.Tool does not exist"),
        (Attributes("p.tub.Pool", "size"), "p.tub.Pool does not exist"),
        (Call("p.sub.Pool.extra", "batch"), "p.sub.Pool.extra does not exist"),
        (
            Call("p.base.Pool.get", "layer_id", "factor"),
            "p.base.Pool.get takes (self, layer_id, *, scale=None), not (layer_id, factor=)",
        ),
        (
            Call("p.base.Pool.get", "layer_id scale"),
            "p.base.Pool.get takes (self, layer_id, *, scale=None), not (layer_id, scale)",
        ),
        (
            Call("p.sub.Pool.call", "batch"),
            "p.sub.Pool.call takes (self, batch, plan=None, *, mode, **kwargs), not (batch)",
        ),
        (
            Hook("p.sub.Pool.plain", "second"),
            "p.sub.Pool.plain takes (first, second), not (second)",
        ),
    ],
)
def test_a_symbol_that_does_not_fit(package: Path, symbol: symbols.Symbol, problem: str) -> None:
    assert problems([symbol], package) == [(symbol, problem)]

"""The flags in SGLang's own parser, config file and `ServerArgs`, and the refusals by name."""

from __future__ import annotations

import argparse
import logging
import pickle
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fused_fallback.integration import plugin, refusals
from fused_fallback.integration.adapters.versions import ADAPTERS, adapter_for
from fused_fallback.integration.flags import FallbackArguments, arguments_of, server_args
from sglang_server import PAIR, SPECULATIVE, TRITON_RELEASE, Server

FLAG = "--speculative-fused-fallback"


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def prepare(*argv: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", str(PAIR / "target"), "--device", "cpu", *argv])


def test_hooks_landed() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in (
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    ):
        assert target in HookRegistry._patched


def test_registering_twice_adds_nothing() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}
    plugin.register()
    assert {target: list(hooks) for target, hooks in HookRegistry._hooks.items()} == before


def test_help_shows_the_flags() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = parser.format_help()
    for flag in (
        FLAG,
        f"{FLAG}-threshold N",
        f"{FLAG}-resume N",
        f"{FLAG}-min-steps N",
        f"{FLAG}-float8",
    ):
        assert flag in text


def test_command_line_reaches_server_args_and_survives_pickling() -> None:
    argv = (FLAG, f"{FLAG}-threshold", "16", f"{FLAG}-resume", "6", f"{FLAG}-min-steps=3")
    record = pickle.loads(pickle.dumps(prepare(*argv)))
    assert arguments_of(record) == FallbackArguments(threshold=16, resume=6, min_steps=3)
    assert arguments_of(prepare(FLAG, f"{FLAG}-float8")) == FallbackArguments(float8=True)


def test_config_file(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "speculative-fused-fallback: true\nspeculative-fused-fallback-threshold: 12\n"
    )
    assert arguments_of(prepare("--config", str(config))) == FallbackArguments(threshold=12)


def test_without_the_flag_nothing_changes() -> None:
    record = prepare()
    assert arguments_of(record) is None
    assert "_fused_fallback" not in vars(record)
    assert record.max_running_requests is None


def test_server_args_for_the_engine() -> None:
    record = server_args(
        model_path=str(PAIR / "target"),
        device="cpu",
        speculative_fused_fallback=True,
        speculative_fused_fallback_threshold=100,
    )
    assert arguments_of(record) == FallbackArguments(threshold=100)
    assert record.max_running_requests == 200


def test_the_cap_on_running_requests_is_raised_only_where_unset() -> None:
    assert prepare(FLAG).max_running_requests == 128
    assert prepare(FLAG, f"{FLAG}-threshold", "8").max_running_requests == 48
    assert prepare(FLAG, "--max-running-requests", "20").max_running_requests == 20


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([f"{FLAG}-threshold", "4"], f"{FLAG}-threshold needs {FLAG} as well"),
        ([FLAG, f"{FLAG}-threshold", "0"], "must be 1 or more, got 0"),
        ([FLAG, f"{FLAG}-threshold", "4", f"{FLAG}-resume", "4"], "threshold - 1 = 3, got 4"),
        ([FLAG, f"{FLAG}-min-steps", "-1"], "must be 1 or more, got -1"),
    ],
)
def test_contradictory_values_end_the_start_with_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        prepare(*argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_value_is_argparse_s_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare(FLAG, f"{FLAG}-threshold", "many")
    assert "invalid int value: 'many'" in capsys.readouterr().err


SUPPORTED = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "draft",
    "kv_cache_dtype": "auto",
    "device": "cuda",
    "pp_size": 1,
    "disaggregation_mode": "null",
}


def test_supported_settings_are_not_refused() -> None:
    assert refusals.refuse_settings(SUPPORTED.get) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speculative_algorithm": None}, "--speculative-algorithm EAGLE3, got None"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE3, got EAGLE"),
        ({"speculative_algorithm": "NEXTN"}, "NEXTN"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"pp_size": 2}, "--pp-size 1, got 2"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_use_rejection_sampling": True}, "rejection"),
        ({"speculative_draft_window_size": 512}, "sliding-window"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        ({"device": "npu"}, "--device npu"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    assert named in refusals.refuse_settings((SUPPORTED | change).get)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLMEagle3"]}, "Qwen2ForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"rope_scaling": {"mrope_section": [1, 2]}}, "mrope"),
    ],
)
def test_unsupported_drafts_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    assert refusals.refuse_draft(SimpleNamespace(**config)) is None
    assert named in refusals.refuse_draft(SimpleNamespace(**config | change))


def test_a_real_record_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.tp_worker import TpModelWorker

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(TpModelWorker, "__init__", load)
    refused = "fused fallback: off: it needs --speculative-algorithm EAGLE3, got None"
    with pytest.raises(plugin.FusedFallbackError, match=refused):
        Server(script=lambda step: True, **dict.fromkeys(SPECULATIVE))


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.99 is not known"):
        adapter_for("0.5.99")
    assert adapter_for() in ADAPTERS[version("sglang")].values()


def test_a_threshold_above_the_cap_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    text = refusals.warn_threshold({"max_running_requests": 48}.get, 64)
    assert "64" in text and "48" in text
    assert refusals.warn_threshold({"max_running_requests": 64}.get, 64) is None


def test_the_scheduler_says_that_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "fused_fallback"),
        Server(script=lambda step: False) as server,
    ):
        info = server.scheduler.get_init_info()["_fused_fallback"]
    lines = [r.getMessage() for r in caplog.records if "fused fallback: on" in r.getMessage()]
    assert lines == [f"fused fallback: {info}"]
    worker = "EAGLEWorker" if TRITON_RELEASE else "EAGLEWorkerV2"
    assert f"worker {worker}, SGLang 0.5." in info


def test_a_hook_that_did_not_land_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
    target = "sglang.srt.managers.scheduler.NoSuchClass.step"
    monkeypatch.setattr(adapter_for(), "forward_target", target)
    with pytest.raises(plugin.FusedFallbackError, match=r"NoSuchClass\.step"):
        plugin.register_worker(adapter_for())


def test_a_scheduler_without_the_plugin_is_noticed() -> None:
    with pytest.raises(plugin.FusedFallbackError, match="came up without it"):
        plugin._verify((SimpleNamespace(scheduler_infos=[{"status": "ready"}]),))
    plugin._verify((SimpleNamespace(scheduler_infos=[{"_fused_fallback": "on"}]),))

"""The SGLang plugin: `register` is what the entry point `sglang.srt.plugins` names.

It runs in every process of a server. The launcher's hooks read the flags, refuse what is not
supported before weights load, and check at the end that the schedulers really run the fused
fallback, because SGLang logs and swallows a plugin's errors. The worker's hooks are registered in
the scheduler process, and only where the flag is given.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

from . import flags, refusals
from .adapters.adapter import Adapter
from .adapters.versions import adapter_for
from .symbols import Attributes, Call, Hook, Symbol

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
ENGINE = "sglang.srt.entrypoints.engine"
REGISTRY = "sglang.srt.plugins.hook_registry.HookRegistry"
SYMBOLS: tuple[Symbol, ...] = (
    Hook(f"{SERVER_ARGS}.add_cli_args", "parser"),
    Hook(f"{SERVER_ARGS}.from_cli_args", "args"),
    Hook(f"{ENGINE}.Engine._launch_subprocesses", "server_args"),
    Hook(f"{SCHEDULER}.__init__", "server_args"),
    Hook(f"{SCHEDULER}.get_init_info"),
    Hook(f"{SCHEDULER}.get_internal_state"),
    Attributes(SCHEDULER, "draft_worker"),
    Attributes(f"{ENGINE}.SchedulerInitResult", "scheduler_infos"),
    Attributes("sglang.srt.managers.io_struct.GetInternalStateReqOutput", "internal_state"),
    Call(f"{REGISTRY}.register", "target hook hook_type", "source"),
    Attributes(REGISTRY, "apply_hooks _hooks _patched"),
    Call("sglang.srt.utils.log_info_on_rank0", "logger msg"),
)
"""What every release must have; an adapter declares what it needs besides."""
ATTRIBUTE = "_fused_fallback"
"""Where the adapter lives: on the worker, and on the scheduler."""


class FusedFallbackError(RuntimeError):
    """The flag is given, but the server cannot run the fused fallback; the text says why."""


def register() -> None:
    """Register the launcher's and the scheduler's hooks; a second call registers nothing."""
    register_flags()
    _register(
        {
            f"{ENGINE}.Engine._launch_subprocesses": ("around", _launch),
            f"{SCHEDULER}.__init__": ("around", _init_scheduler),
            f"{SCHEDULER}.get_init_info": ("after", _add_init_info),
            f"{SCHEDULER}.get_internal_state": ("after", _add_internal_state),
        }
    )


def register_flags() -> None:
    """Register the hooks through which SGLang's parser takes the flags."""
    _register(
        {
            f"{SERVER_ARGS}.add_cli_args": ("after", _add_cli_args),
            f"{SERVER_ARGS}.from_cli_args": ("around", _from_cli_args),
        }
    )


def register_worker(adapter: type[Adapter]) -> None:
    """Register and apply the hooks of the scheduler process.

    Args:
        adapter: of the worker that will run.

    Raises:
        FusedFallbackError: SGLang could not apply one; the text names it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = {
        adapter.forward_target: ("around", _forward),
        adapter.prefill_target: ("around", _prefill),
        **({adapter.relay_target: ("around", _relay)} if adapter.relay_target else {}),
        **{target: ("around", hook) for target, hook in adapter.metrics_hooks.items()},
    }
    _register(hooks)
    HookRegistry.apply_hooks()
    missing = sorted(set(hooks) - HookRegistry._patched)
    if missing:
        raise FusedFallbackError(
            f"fused fallback: off: SGLang did not apply the hooks on {', '.join(missing)}"
        )


def _register(hooks: dict[str, tuple[str, Callable[..., Any]]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="fused_fallback", dist_name="sglang-fused-fallback")
    for target, (kind, hook) in hooks.items():
        if all(registered is not hook for _, registered, _ in HookRegistry._hooks[target]):
            HookRegistry.register(target, hook, HookType(kind), source=source)


# ---- in the launcher: flags in, refusals out


def _add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    flags.add_cli_args(parser)


def _from_cli_args(from_cli_args: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    try:
        arguments = flags.from_cli(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    record = from_cli_args(cls, args)
    return record if arguments is None else flags.attach(record, arguments)


def _launch(launch: Callable[..., Any], cls: type, server_args: Any, *args: Any, **kw: Any) -> Any:
    arguments = flags.arguments_of(server_args)
    if arguments is None:
        logger.info("fused fallback: off: %s is not given", flags.FLAG)
        return launch(cls, server_args, *args, **kw)
    setting = _check(server_args, arguments, in_launcher=True)
    result = launch(cls, server_args, *args, **kw)
    # Replicas behind a data parallel controller report to it alone, and each logs its own line.
    if (setting("dp_size") or 1) == 1 and (setting("node_rank") or 0) == 0:
        _verify(result)
    return result


def _check(
    server_args: Any, arguments: flags.FallbackArguments, *, in_launcher: bool = False
) -> refusals.Setting:
    """Refuse what `fused-fallback check` shows in red; the launcher compares SGLang's source too.

    Raises:
        SystemExit: as one line, where the flags came from the command line.
        FusedFallbackError: where they did not.
    """
    from . import check

    lines = list(check.installation()) if in_launcher else []
    reason = check.refusal(lines)
    if reason is None:
        try:
            adapter = adapter_for(server_args=server_args)
            if hasattr(server_args, "resolve_once"):
                server_args.resolve_once()
            lines += check.server(adapter, server_args, arguments)
            reason = check.refusal(lines)
        except ValueError as error:
            reason = str(error)
    if reason:
        refused = f"fused fallback: off: {reason}"
        if arguments.from_command_line:
            raise SystemExit(refused)
        raise FusedFallbackError(refused)
    for line in lines if in_launcher else ():
        if line.status == check.WARN:
            logger.warning("fused fallback: %s", line.text)
    return partial(adapter.setting, server_args)


def _verify(launched: tuple[Any, ...]) -> None:
    infos = [
        info
        for part in launched
        for info in getattr(part, "scheduler_infos", None) or ()
        if isinstance(info, dict)
    ]
    if not infos or any(ATTRIBUTE not in info for info in infos):
        raise FusedFallbackError(
            "fused fallback: off: a scheduler came up without it; its log says why "
            "(is the plugin installed in that environment, and does SGLANG_PLUGINS allow it?)"
        )


# ---- in the scheduler process: bind the worker, report


def _init_scheduler(init: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    server_args = kwargs.get("server_args", args[0] if args else None)
    arguments = flags.arguments_of(server_args)
    if arguments is None:
        return init(scheduler, *args, **kwargs)
    from sglang.srt.utils import log_info_on_rank0

    _check(server_args, arguments)
    adapter_class = adapter_for(server_args=server_args)
    register_worker(adapter_class)
    init(scheduler, *args, **kwargs)
    worker = scheduler.draft_worker
    if type(worker).__name__ != adapter_class.worker_class:
        raise FusedFallbackError(
            f"fused fallback: off: SGLang started {type(worker).__name__} where "
            f"{adapter_class.worker_class} was expected: no adapter is known for it"
        )
    adapter = adapter_class(worker, arguments)
    if tool := os.environ.get("FUSED_FALLBACK_PROFILE"):  # "nvtx" or "step_clock"
        import_module(f"..profiling.{tool}", __package__).enable_serving(adapter)
    relays = [scheduler.future_map] if adapter.relay_target else []
    for holder in (*adapter.hooked, scheduler, *relays):
        setattr(holder, ATTRIBUTE, adapter)
    log_info_on_rank0(logger, f"fused fallback: {describe(adapter)}")


def describe(adapter: Adapter) -> str:
    """The log line of a scheduler that runs the fused fallback."""
    arguments = adapter.fallback.policy.arguments
    kept = adapter.fallback.kept_hidden_states
    return (
        f"on (worker {type(adapter.worker).__name__}, SGLang {version('sglang')}, "
        f"plugin {version('sglang-fused-fallback')}, off from {arguments.threshold} running "
        f"requests, on again at {arguments.resume}, at least {arguments.min_steps} steps each; "
        f"{adapter.graphs.summary}, kept hidden states {kept.nbytes / 2**20:.1f} MiB)"
    )


def _add_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    adapter = getattr(scheduler, ATTRIBUTE, None)
    return info if adapter is None else {**info, ATTRIBUTE: describe(adapter)}


def _add_internal_state(output: Any, scheduler: Any, *_args: Any) -> Any:
    adapter = getattr(scheduler, ATTRIBUTE, None)
    if adapter is not None:
        output.internal_state["fused_fallback"] = adapter.fallback.state()
    return output


# ---- in the worker: one path from the hook to the store


def _forward(forward: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    adapter = getattr(worker, ATTRIBUTE, None)
    if adapter is None:
        return forward(worker, batch, *args, **kw)
    return adapter.forward(forward, batch, *args, **kw)


def _relay(stash: Callable[..., Any], future_map: Any, *args: Any, **kw: Any) -> Any:
    adapter = getattr(future_map, ATTRIBUTE, None)
    if adapter is None:
        return stash(future_map, *args, **kw)
    return adapter.relay(stash, future_map, *args, **kw)


def _prefill(prefill: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    adapter = getattr(worker, ATTRIBUTE, None)
    if adapter is None:
        return prefill(worker, batch, *args, **kw)
    return adapter.draft_prefill(prefill, batch, *args, **kw)

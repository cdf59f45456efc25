"""The server flags, and the record that carries them to the scheduler process on every rank.

SGLang's `ServerArgs` takes no foreign fields, so the parsed values travel as one underscore
attribute of it, which SGLang pickles along with the record.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

FLAG = "--speculative-fused-fallback"
THRESHOLD, RESUME, MIN_STEPS = (f"{FLAG}-{name}" for name in ("threshold", "resume", "min-steps"))
FLOAT8 = f"{FLAG}-float8"
ATTRIBUTE = "_fused_fallback"

_VALUES = {"threshold": THRESHOLD, "resume": RESUME, "min_steps": MIN_STEPS, "float8": FLOAT8}
DEFAULT_THRESHOLD = 64  # arbitrary: the crossing point depends on model, GPU and prompts
DEFAULT_MIN_STEPS = 8  # arbitrary: a flip back costs about one draft-extend step


@dataclass(frozen=True)
class FallbackArguments:
    """When speculation is off, in running requests of one decode batch.

    Args:
        threshold: from this many running requests on, speculation is off (1 or more; 1 means
            always off).
        resume: at or below this many it is on again; below `threshold`. Default: three quarters
            of the threshold, rounded down.
        min_steps: decode steps that a mode is kept at least, 1 or more.
        float8: whether off steps read fc and the K and V rows in float8_e4m3fn.
        from_command_line: a refusal ends the process with one line, not with a traceback.

    Raises:
        ValueError: a value outside these ranges; the text names the flag, the value and the range.
    """

    threshold: int = DEFAULT_THRESHOLD
    resume: int | None = None
    min_steps: int = DEFAULT_MIN_STEPS
    float8: bool = False
    from_command_line: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.resume is None:
            object.__setattr__(self, "resume", self.threshold * 3 // 4)
        if self.threshold < 1:
            raise ValueError(f"{THRESHOLD} must be 1 or more, got {self.threshold}")
        if self.min_steps < 1:
            raise ValueError(f"{MIN_STEPS} must be 1 or more, got {self.min_steps}")
        if not 0 <= self.resume < self.threshold:
            raise ValueError(
                f"{RESUME} must lie between 0 and {THRESHOLD} - 1 = {self.threshold - 1}, "
                f"got {self.resume}"
            )

    @property
    def max_running_requests(self) -> int:
        """The cap on running requests to set where the user set none.

        SGLang caps a speculative server at 48, below which a higher threshold is never reached.
        """
        return max(48, 2 * self.threshold)


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's parser (`--help`, `--config` files and `sglang serve`)."""
    group = parser.add_argument_group("fused fallback")
    group.add_argument(
        FLAG,
        action="store_true",
        help="Switch EAGLE-3 speculation off while many requests run, and back on warm.",
    )
    group.add_argument(
        THRESHOLD,
        type=int,
        metavar="N",
        help=f"Running requests from which speculation is off (default {DEFAULT_THRESHOLD}).",
    )
    group.add_argument(
        RESUME,
        type=int,
        metavar="N",
        help="Running requests at or below which it is on again (default: 3/4 of the threshold).",
    )
    group.add_argument(
        MIN_STEPS,
        type=int,
        metavar="N",
        help=f"Decode steps that a mode is kept at least (default {DEFAULT_MIN_STEPS}).",
    )
    group.add_argument(
        FLOAT8,
        action="store_true",
        default=None,
        help="Off steps read the draft's weights in float8: half the bytes, drafts a little worse.",
    )


def pop_arguments(values: dict[str, Any]) -> FallbackArguments | None:
    """Take the fused fallback's values out of `values`; None where the flag is not given.

    Args:
        values: flag values by their Python names (`speculative_fused_fallback`, ...).

    Raises:
        ValueError: contradictory or out-of-range values.
    """
    enabled = values.pop(_name(FLAG), False)
    given = {field: values.pop(_name(flag), None) for field, flag in _VALUES.items()}
    given = {field: value for field, value in given.items() if value is not None}
    if enabled:
        return FallbackArguments(**given)
    if given:
        names = ", ".join(_VALUES[field] for field in given)
        raise ValueError(f"{names} needs {FLAG} as well: without it speculation is never off")
    return None


def server_args(**kwargs: Any) -> ServerArgs:
    """Build SGLang's `ServerArgs` with the fused fallback's arguments, for `sglang.Engine`.

    `sglang.Engine(server_args=server_args(model_path=..., speculative_fused_fallback=True))`

    Args:
        kwargs: what `sglang.Engine` takes, and `speculative_fused_fallback` (bool),
            `speculative_fused_fallback_threshold`, `_resume`, `_min_steps` (int) and `_float8`
            (bool).

    Raises:
        ValueError: contradictory or out-of-range values.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()  # as sglang.Engine does: before ServerArgs, which plugins may hook
    from sglang.srt.server_args import ServerArgs

    arguments = pop_arguments(kwargs)
    if arguments is None:
        return ServerArgs(**kwargs)
    if kwargs.get("max_running_requests") is None:
        kwargs["max_running_requests"] = arguments.max_running_requests
    return attach(ServerArgs(**kwargs), arguments)


def from_cli(args: argparse.Namespace) -> FallbackArguments | None:
    """Take the fused fallback's values out of parsed flags, and raise the cap where it is unset.

    Raises:
        ValueError: contradictory or out-of-range values.
    """
    arguments = pop_arguments(vars(args))
    if arguments is None:
        return None
    if args.max_running_requests is None:
        args.max_running_requests = arguments.max_running_requests
    return replace(arguments, from_command_line=True)


def attach(record: ServerArgs, arguments: FallbackArguments) -> ServerArgs:
    """Store the arguments on SGLang's record and return it."""
    setattr(record, ATTRIBUTE, arguments)
    return record


def arguments_of(record: ServerArgs) -> FallbackArguments | None:
    """The fused fallback's arguments on SGLang's record; None where the flag is not given."""
    return getattr(record, ATTRIBUTE, None)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")

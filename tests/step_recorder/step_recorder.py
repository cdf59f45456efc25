"""SGLang plugin of the tests: records every decode step of a speculating server's requests.

`$STEP_RECORD` names the file. A step is one line, a JSON list of [rid, position, accept length,
off], where position counts the output tokens before the step. Steps that end a request are left
out: they may have accepted more than the request took.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, record, HookType.AROUND)


def record(process: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
    """Hook of `process_batch_result`."""
    decodes = batch.forward_mode.is_decode() and not batch.spec_algorithm.is_none()
    reqs = list(batch.reqs) if decodes else []
    lengths = [len(req.output_ids) for req in reqs]
    process(scheduler, batch, result)
    if not decodes:
        return
    if result.accept_lens is None:  # spec v1 has appended the tokens already
        accept_lens = [count + 1 for count in result.num_correct_drafts_per_req_cpu]
        lengths = [n - accept for n, accept in zip(lengths, accept_lens, strict=True)]
    else:
        accept_lens = result.accept_lens.tolist()
    off = result.speculative_num_draft_tokens == 1
    steps = [
        [req.rid, length, accept, off]
        for req, length, accept in zip(reqs, lengths, accept_lens, strict=True)
        if not req.finished()
    ]
    with open(os.environ["STEP_RECORD"], "a") as file:
        file.write(json.dumps(steps) + "\n")

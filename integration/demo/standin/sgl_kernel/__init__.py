"""Pure-torch stand-in for the CPU build of `sgl_kernel`, which PyPI does not have.

It holds the operators that SGLang 0.5.17 and 0.5.23 call on a CPU for dense Llama-type models and
EAGLE speculation, for demos and tests on a machine without a GPU. `convert_weight_packed` is absent
on purpose: SGLang then takes its native torch path in every layer. Arguments outside this scope
raise NotImplementedError with the operator's name.
"""

import torch

if torch.cuda.is_available():
    raise ImportError(
        f"the CPU stand-in for sgl_kernel ({__file__}) was imported on a machine with a CUDA GPU: "
        "take its folder off PYTHONPATH and install SGLang's own sgl-kernel"
    )

from . import attention
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .tree import (
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

attention.register()

#!/bin/sh
# Nsight Systems on a serving run: some decode steps of one mode, every kernel of them.
#   profiling/nsys_serving.sh REPORT MODE --model-path TARGET --draft-model-path DRAFT [...]
# MODE and the rest are those of trace_serving (MODE: nospec, static, on, off, threshold, ...).
#
# Settings:
#   --trace            CUDA calls and GPU work; NVTX ranges; blocking system calls of the CPU side
#   --cuda-graph-trace each kernel of a graph, not a graph as one bar
#   --trace-fork-before-exec  the scheduler, which owns the GPU, is a child's child
#   --capture-range    only the steps between cudaProfilerStart and -Stop, which SGLang's
#                      /start_profile calls in the scheduler; the start of a server would be GBs
#   --sample, --cpuctxsw      no sampling of the CPU, which would slow the scheduler's loop
# Ranges: `off step`, `fused draft step`, `draft KV write`, `fused draft prefill`, `catch-up`; marks
# `flip on`, `flip off` (nvtx.py); SGLang's own beside them.
#
# How to read it, in nsys-ui: open the scheduler's process, and in it the CUDA HW row. Between two
# runs of the target's graph there should be nothing but SGLang's sampler, copies and one kernel of the
# draft step; white space there is the CPU being late: look for the NVTX range above it that is longer
# than a step. A `draft KV write` stands before every prefill and where 512 rows wait, a `catch-up`
# once behind each `flip on`. As text:
#   nsys stats --report nvtx_gpu_proj_sum,nvtx_sum,cuda_gpu_kern_sum REPORT.nsys-rep
# GPU projections of the ranges first, then their CPU times, then kernels by total time.
set -e
if [ $# -lt 2 ]; then
  sed -n 2,4p "$0"
  exit 2
fi
if ! command -v nsys >/dev/null; then
  echo "nsys is not installed here (it comes with the CUDA toolkit or Nsight Systems):" \
    "python -m fused_fallback.profiling.trace_serving needs torch alone" >&2
  exit 1
fi
report=$1
mode=$2
shift 2
export SGLANG_ENABLE_NVTX_SCHEDULER=1
exec nsys profile --output "$report" --force-overwrite true \
  --trace cuda,nvtx,osrt --cuda-graph-trace node --trace-fork-before-exec true \
  --capture-range cudaProfilerApi --capture-range-end stop --sample none --cpuctxsw none \
  "${PYTHON:-python3}" -m fused_fallback.profiling.trace_serving --nsys --modes "$mode" "$@"

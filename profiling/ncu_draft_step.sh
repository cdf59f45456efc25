#!/bin/sh
# Nsight Compute on one fused draft step: bandwidth, occupancy, stalls of each of its kernels.
#   profiling/ncu_draft_step.sh [shape] [rows] [backend: auto, triton]
#
# Settings:
#   --profile-from-start off  only the fourth step, which stands between cudaProfilerStart and -Stop:
#                             those before it compile and warm up
#   --clock-control none      clocks as they are in serving (ncu would hold them low)
#   caches are flushed before each kernel (ncu's default), as weights are cold in serving
#   --section                 only these: every further one replays the kernel more often
#
# How to read it: `DRAM Throughput` is the share of the peak that counts, since a step of few rows
# reads every weight once and computes little; compare `Duration` with the floor of the same shape
# and rows in results/draft_step_h200.json (`bench_draft_step`). Far from it, `Warp State` names the
# stall that dominates: long scoreboard is waiting for weights (more bytes in flight are needed),
# barrier is waiting for other warps of the block. `Theoretical` above `Achieved Occupancy` is a
# grid too small for the GPU.
set -e
if ! command -v ncu >/dev/null; then
  echo "ncu is not installed here (it comes with the CUDA toolkit or Nsight Compute)" >&2
  exit 1
fi
echo "# ncu_draft_step.sh $*, commit $(git rev-parse --short HEAD 2>/dev/null || echo "$COMMIT"), $(date -I)"
exec ncu --profile-from-start off --clock-control none \
  --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy \
  --section LaunchStats --section WarpStateStats \
  "${PYTHON:-python3}" -m fused_fallback.profiling.bench_draft_step \
  --once 4 --shapes "${1:-8b}" --rows "${2:-64}" --backend "${3:-auto}"

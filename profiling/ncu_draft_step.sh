#!/bin/sh
# Nsight Compute on the one-launch draft step: bandwidth, occupancy, stalls. The fourth launch, after
# warm-up; clocks as they are; caches flushed before it. Needs a Hopper GPU and ncu.
#   profiling/ncu_draft_step.sh [shape] [rows]
exec ncu --kernel-name draft_step_kernel --launch-skip 3 --launch-count 1 --clock-control none \
  --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy \
  --section LaunchStats --section WarpStateStats \
  python3 -m fused_fallback.profiling.bench_draft_step \
  --once 4 --shapes "${1:-8b}" --rows "${2:-64}"

#!/usr/bin/env bash
# Everything that needs an accelerator, in three rounds of at most 9 minutes on one device and without a network: tests
# marked `gpu`, rates of kernels, numerics, and speed and memory of the presets that fit. benchmarks/README.md tells of
# its parts.
#
#     scripts/gpu_suite.sh [--round 1|2|3] [--device cpu] [--parts NAME ...] [--output FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m benchmarks.gpu_suite "$@"

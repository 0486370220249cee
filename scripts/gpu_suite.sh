#!/usr/bin/env bash
# Everything that needs an accelerator: the tests marked `gpu`, then speed and memory of the presets that fit one device.
# Writes metrics and configuration of each run below the folder given (default: runs/gpu_suite).
#
#     scripts/gpu_suite.sh [OUTPUT]
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-runs/gpu_suite}

# one device: the tests take turns, and pytest-xdist need not be there
python -m pytest -o addopts=--strict-markers -m gpu tests/gpu tests/metrics
for preset in gpt2_124m pangu_350m; do
    python pretrain.py "+config=$preset" data=synthetic validation.every=0 checkpoint.every=0 metrics.wandb=off \
        metrics.tensorboard=false train.steps=10 batch.global_size=32 "train.output=$output/$preset"
    # the first steps warm up
    python - "$output/$preset" <<'PYTHON'
import json, statistics, sys
records = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")][4:]
median = lambda name: statistics.median(record[name] for record in records if record[name] is not None)
known = records[0]["mfu"] is not None
print(f"{sys.argv[1]}: {median('tokens_per_s'):,.0f} tokens/s, {median('tflops_per_device'):.1f} TFLOP/s per device, "
      f"MFU {format(median('mfu'), '.1%') if known else 'n/a'}, peak memory {median('peak_memory_gib'):.2f} GiB")
PYTHON
done

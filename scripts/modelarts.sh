#!/usr/bin/env bash
# The start command of a training job of ModelArts, on any number of nodes; the words behind it are those of pretrain.py:
#
#   bash scripts/modelarts.sh +config=pangu_2_6b train.device=npu precision=fp16 data.train=[/cache/corpus] \
#       validation.every=0 train.output=/mnt/sfs/runs/pangu_2_6b
#
# train.output lies on a file system that all nodes mount (SFS Turbo). ModelArts starts a failed job again if you ask for
# that; with train.stop_status=143 a run that was told to stop counts as failed.
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=${VC_WORKER_HOSTS:-localhost}
exec python scripts/launch.py --nnodes="${MA_NUM_HOSTS:-1}" --node-rank="${VC_TASK_INDEX:-0}" \
    --master-addr="${hosts%%,*}" --master-port=29500 --nproc-per-node="${MA_NUM_GPUS:-8}" pretrain.py "$@"

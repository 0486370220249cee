#!/bin/bash
#SBATCH --nodes=48
# What BLOOM's launch sets (bigscience, train/tr11-176B-ml), in our own words and its way of writing.
TP_SIZE=4
PP_SIZE=12
NLAYERS=70
SEQ_LEN=2048
SAVE=${SCRATCH:-/checkpoints}/bloom

OPTIMIZER=" \
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine \
    --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 \
    --clip-grad 1.0 --weight-decay 1e-1 \
    "
GPT=" \
    --pp-partition-method 'type:transformer|embedding' \
    --num-layers $NLAYERS --hidden-size 14336 --num-attention-heads 112 \
    --seq-length $SEQ_LEN --max-position-embeddings $SEQ_LEN \
    --micro-batch-size 2 --global-batch-size 2048 --rampup-batch-size 192 16 9_765_625 \
    --train-samples 220_000_000 \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path $TOKENIZER \
    --init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 \
    --position-embedding-type alibi --checkpoint-activations \
    --pad-vocab-size-to 250880 --exit-duration-in-mins 5990 \
    $OPTIMIZER \
    "
config=./ds_config.$SLURM_JOB_ID.json
cat <<EOT > $config
{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}
EOT
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE \
    $GPT \
    --log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1 --save $SAVE \
    --train-weighted-split-paths-path train-splits.txt --data-impl mmap --num-workers 2 \
    --deepspeed --deepspeed_config ${config} --zero-stage 0 \
    "
clear; srun --jobid $SLURM_JOB_ID bash -c "python -m torch.distributed.run --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt

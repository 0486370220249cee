#!/bin/bash
# What Megatron-LM's example for GPT-3 175B sets (examples/gpt3/train_gpt3_175b_distributed.sh), in our own words.
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=128
WORLD_SIZE=$((8 * NODES))
DATA_PATH=$1  # prefix
CHECKPOINT_PATH=$2
LAUNCH=(--nproc_per_node 8 --nnodes $NODES)
MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto # isn't what it was (flash/fused)
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
LAYOUT=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
DATA=(--data-path $DATA_PATH --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1)
LOGGING=(--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
         --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --tensorboard-dir "$3")

torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} \
    ${LAYOUT[@]} "${DATA[@]}" ${LOGGING[@]}

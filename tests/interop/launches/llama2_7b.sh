#!/bin/bash
# Llama 2 7B (Touvron et al. 2023, table 1 and section 2.2) as Megatron-LM's documentation of Llama writes it.
PREFIX=${DATA:-/data/corpus}
torchrun --nproc-per-node=8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size=11008 \
    --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --adam-eps 1e-5 --bf16 --use-distributed-optimizer --overlap-grad-reduce --sequence-parallel \
    --tensor-model-parallel-size 4 --calculate-per-token-loss \
    --train-data-path 0.7 ${PREFIX}_web 0.3 ${PREFIX}_books --valid-data-path ${PREFIX}_held_out --eval-iters 8

"""Optimizers over fp32 tensors, learning-rate schedules and the fp16 loss scale."""

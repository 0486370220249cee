"""Training: the trainer and its loop, saving and resuming, faults, profiling and autotuning."""

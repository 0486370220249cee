"""Pipeline parallelism: the stages of a model, and the runner that executes their schedule."""

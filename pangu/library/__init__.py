"""Public interface for models that are not ours: ZeRO, pipelines, parallel linear layers and checkpoints."""

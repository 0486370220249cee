"""Translation of other programs' settings to overrides of `pretrain.py`, with a list of the differences."""

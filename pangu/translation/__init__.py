"""Other programs' settings as overrides of `pretrain.py`, and what they do otherwise."""

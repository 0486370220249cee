"""Building blocks of models: parallel linear layers, attention, experts, losses, dropout and recompute."""

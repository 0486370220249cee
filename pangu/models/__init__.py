"""GPT and PanGu-α: modules, parameter tables and sizes."""

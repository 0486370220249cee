"""Configuration of a run: schema, checks and help texts."""

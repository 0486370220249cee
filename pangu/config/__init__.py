"""Configuration of a run: schema, checks, help texts, and the errors and files that all layers share."""

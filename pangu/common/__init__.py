"""Errors, files, exit status and console: what every folder may use, with nothing but the standard library."""

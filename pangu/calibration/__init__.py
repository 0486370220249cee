"""Measurements of the machine that this runs on, from which plans are made."""

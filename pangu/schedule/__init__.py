"""Schedules of a step as data: orders, expansion to operations, checks, simulation and the step's ledger."""

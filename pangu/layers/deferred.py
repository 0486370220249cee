"""Placeholder."""

from contextlib import contextmanager


class WeightGradients:
    @contextmanager
    def held(self, key):  # type: ignore
        yield

    def compute(self, key):  # type: ignore
        pass

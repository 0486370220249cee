"""Lengths of documents as numbers."""

from __future__ import annotations

import numpy as np
import pytest

from pangu.prepare import preprocessing
from pangu.prepare.preprocessing import length_statistics


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 5003])
def test_quantiles_are_lengths_of_documents(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of numpy's `inverted_cdf`, in parts too."""
    monkeypatch.setattr(preprocessing, "_AT_ONCE", 1000)
    lengths = np.exp(np.random.default_rng(0).normal(6, 2, count)).astype(np.int32)
    found = length_statistics(lengths)["lengths"]
    for name, percent in (("median", 50), ("p90", 90), ("p99", 99)):
        assert found[name] == np.percentile(lengths, percent, method="inverted_cdf")


def test_documents_of_one_length_have_it_as_their_median() -> None:
    found = length_statistics(np.full(7, 1000, np.int32))
    assert {*found["lengths"].values()} == {1000}
    assert found["histogram"] == {"981": 7}
    assert {*length_statistics(np.zeros(0, np.int32))["lengths"].values()} == {0}

"""The progress bar."""

from __future__ import annotations

import pytest

from pangu.metrics.progress import ProgressBar


@pytest.mark.parametrize("show", [True, False])
def test_progress_bar(capfd: pytest.CaptureFixture[str], show: bool) -> None:
    with ProgressBar(show) as progress:
        assert list(progress.track([1, 2], description="Counting")) == [1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert ("Counting" in err) == show

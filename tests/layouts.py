"""Any layout, for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Layout

FEW = st.integers(1, 4)


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, number + 1) if number % d == 0])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """With all axes, ZeRO over all replicas or a group of them, and experts whole or cut."""
    layout = Layout(draw(FEW), draw(st.integers(1, 2)), draw(FEW), draw(st.integers(0, 1)), context=draw(FEW))
    expert_tensor = draw(st.sampled_from((0, 1)))
    expert = draw(divisors(layout.replicas * layout.tensor // (expert_tensor or layout.tensor)))
    zero_group = draw(st.sampled_from([0, *(d for d in range(1, layout.replicas + 1) if layout.replicas % d == 0)]))
    layout = replace(layout, expert=expert, expert_tensor=expert_tensor)
    # what would leave experts of ranks that are not alike
    if ExpertLayout(layout).replicas % max(
        1, zero_group * layout.tensor // (expert * (expert_tensor or layout.tensor))
    ):
        zero_group = 0
    return replace(layout, zero_group=zero_group)

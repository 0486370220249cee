"""What each stage is said to hold and send."""

from __future__ import annotations

from pangu.pipeline.stages import plan_stages
from pangu.report.stages import view_stages
from pangu.topology.layout import Layout
from tests.configs import tiny


def test_stages_in_a_v_with_scores() -> None:
    """[16, 2, 32] hidden states and [2, 2 of 4 heads, 16, 16] scores in fp32, over two boundaries, one to the neighbour
    in each direction of the V; both ends of the model are on the first stage."""
    config = tiny(
        "model.layers=7",
        "model.residual_scores=true",
        "model.positions=relative",
        "parallel.schedule=zb_v",
        "parallel.layers=[2,2,2,1]",
        "parallel.tensor=2",
    )
    layout = Layout(tensor=2, pipeline=2, virtual_stages=2)
    first, second = view_stages(config, layout, plan_stages(config, layout))
    assert first.chunks == ("embedding, layers 0-1", "layer 6, head")
    assert second.chunks == ("layers 2-3", "layers 4-5")
    message = 4 * (16 * 2 * 32 + 2 * 2 * 16 * 16)
    assert first.sends == {1: 2 * message}  # an activation of chunk 0, a gradient of chunk 3
    assert second.sends == {0: 2 * message}
    assert first.shared == second.shared == {"position_bias.weight": 4 * 32 * 2}
    assert first.held == second.held == 2.0


def test_modules_of_multi_token_prediction_are_told_from_layers() -> None:
    config = tiny("model.layers=3", "model.mtp_layers=2", "parallel.layers=[2,1]")
    layout = Layout(pipeline=2)
    views = view_stages(config, layout, plan_stages(config, layout))
    assert [view.chunks for view in views] == [("embedding, layers 0-1",), ("layer 2, head, 2 mtp modules",)]


def test_sequence_parallel_stages_send_their_slice_and_share_the_tied_table() -> None:
    config = tiny("model.layers=3", "parallel.tensor=2", "parallel.sequence=true", "precision=bf16")
    layout = Layout(tensor=2, pipeline=3, sequence=True)
    views = view_stages(config, layout, plan_stages(config, layout))
    assert [view.sends for view in views] == [{1: 2 * 8 * 2 * 32}, {0: 2 * 8 * 2 * 32, 2: 2 * 8 * 2 * 32}, {1: 1024}]
    assert [list(view.shared) for view in views] == [["embedding.word.weight"], [], ["embedding.word.weight"]]
    assert views[0].shared == {"embedding.word.weight": 4 * 51 * 32}


def test_context_parallel_stages_send_their_part_of_the_sequence() -> None:
    config = tiny("model.layers=2", "parallel.context=2", "parallel.pipeline=2")
    layout = Layout(pipeline=2, context=2)
    assert view_stages(config, layout, plan_stages(config, layout))[0].sends == {1: 4 * 8 * 2 * 32}

"""The types of the public API, which `__init__.py` imports when they are used."""

from pangu.common.errors import UserError as UserError
from pangu.config.data import PackingConfig as PackingConfig
from pangu.data.indexed import open_indexed as open_indexed
from pangu.data.loader import Loader as Loader
from pangu.data.stream import SampleStream as SampleStream
from pangu.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from pangu.layers.linear import RowParallelLinear as RowParallelLinear
from pangu.library.checkpoints import load as load
from pangu.library.checkpoints import read_weights as read_weights
from pangu.library.checkpoints import save as save
from pangu.library.connect import connect as connect
from pangu.library.parallel_linear import column_parallel as column_parallel
from pangu.library.parallel_linear import local_sequence as local_sequence
from pangu.library.parallel_linear import row_parallel as row_parallel
from pangu.library.pipeline import Pipeline as Pipeline
from pangu.library.sharded_model import ShardedModel as ShardedModel
from pangu.library.sharded_model import Update as Update
from pangu.library.sharded_model import shard as shard
from pangu.optim.lamb import Lamb as Lamb
from pangu.prepare.indexed_writer import IndexedWriter as IndexedWriter
from pangu.topology.layout import Layout as Layout
from pangu.topology.mesh import Mesh as Mesh

__all__: list[str]
__version__: str

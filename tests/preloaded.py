"""What the fork server imports, once, of what runs import: modules only, nothing that starts threads."""
# ruff: noqa: F401

import matplotlib.backends.backend_agg
import torch._dynamo  # as every optimizer of torch does
import torch.distributed.run
import transformers

import pangu.metrics.plots
import pangu.report.dry_run
import pangu.training.run
import scripts.evaluate
import scripts.generate

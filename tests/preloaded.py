"""What the fork server imports: modules only, nothing that starts threads."""

import torch.distributed.run  # noqa: F401
import transformers  # noqa: F401

import scripts.evaluate
import scripts.generate  # noqa: F401

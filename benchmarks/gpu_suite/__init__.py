"""Everything that needs an accelerator, in parts that each write one JSON file. `scripts/gpu_suite.sh` runs them."""

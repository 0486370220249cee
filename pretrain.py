"""Pretrains a GPT or PanGu-α model.

python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart
"""

import sys

if __name__ == "__main__":
    try:
        import pangu_train  # noqa: F401 - recognizes a foreign package pangu
        from pangu.pretrain import main

        main()
    except KeyboardInterrupt:  # of the first imports, before the run itself listens to Ctrl-C
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)

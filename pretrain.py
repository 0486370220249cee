"""Pretrains a GPT or PanGu-α model.

python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart
"""

import sys

if __name__ == "__main__":
    try:
        import pangu
        from pangu.pretrain import main

        main()
    except ModuleNotFoundError as error:
        if error.name != "pangu.pretrain":
            raise
        print(
            f"error: {pangu.__file__} is another package named pangu; uninstall it: pip uninstall pangu",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:  # of the first imports, before the run itself listens to Ctrl-C
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)

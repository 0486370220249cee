"""Pretrains a GPT or PanGu-α model.

python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart
"""

from pangu.pretrain import main

if __name__ == "__main__":
    main()

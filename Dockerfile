# docker build -t pangu .
# docker run --gpus all --ipc=host -v $PWD/runs:/workspace/runs pangu \
#     torchrun --nproc-per-node=8 pretrain.py +config=pangu_350m data.train=[runs/corpus]
# For a machine without an accelerator: --build-arg BASE=python:3.12-slim
ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime
FROM ${BASE}
WORKDIR /workspace
COPY pyproject.toml README.md LICENSE pretrain.py ./
COPY pangu ./pangu
COPY configs ./configs
COPY tools ./tools
COPY scripts ./scripts
RUN pip install --no-cache-dir -e .
CMD ["python", "pretrain.py", "--help"]

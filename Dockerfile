# CUDA:   docker build -t pangu .
#         with kernels built from source, each by its version: --build-arg FLASH_ATTN=2.8.3
#         --build-arg TRANSFORMER_ENGINE=2.9.0 --build-arg APEX=25.09 (a tag or commit of NVIDIA/apex)
#         --build-arg ARCHITECTURES="9.0" builds them for one kind of device only
# CPU:    docker build --target cpu -t pangu:cpu .
# A node: docker run --gpus all --ipc=host --ulimit nofile=65536 --user "$(id -u)" --env HOME=/tmp \
#             -v "$PWD/runs:/workspace/runs" pangu python scripts/launch.py --nproc-per-node=8 pretrain.py \
#             +config=pangu_350m data.train=[runs/corpus]
ARG CUDA=pytorch/pytorch:2.11.0-cuda12.8-cudnn9
ARG PYTHON=python:3.12-slim

# what stands in the repository; both images install it
FROM scratch AS source
WORKDIR /workspace
COPY pyproject.toml setup.py README.md LICENSE pangu_train.py pretrain.py ./
COPY pangu ./pangu
COPY configs ./configs
COPY tools ./tools
COPY scripts ./scripts

# kernels that need nvcc, which the image itself does without
FROM ${CUDA}-devel AS kernels
ARG FLASH_ATTN=""
ARG TRANSFORMER_ENGINE=""
ARG APEX=""
ARG ARCHITECTURES="8.0;9.0"
ENV TORCH_CUDA_ARCH_LIST=${ARCHITECTURES} FLASH_ATTENTION_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch \
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 PIP_BREAK_SYSTEM_PACKAGES=1
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
# they are built against this image's torch, so without isolation
# hadolint ignore=DL3013
RUN mkdir /wheels && pip install --no-cache-dir ninja packaging setuptools wheel pybind11 \
    && wheel() { pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels "$@"; } \
    && if [[ -n "$FLASH_ATTN" ]]; then \
        FLASH_ATTN_CUDA_ARCHS=$(tr -d . <<< "$ARCHITECTURES") wheel "flash-attn==$FLASH_ATTN"; fi \
    && if [[ -n "$TRANSFORMER_ENGINE" ]]; then \
        NVTE_CUDA_ARCHS=$(tr -d . <<< "$ARCHITECTURES") \
        wheel "transformer-engine-torch==$TRANSFORMER_ENGINE" "transformer-engine==$TRANSFORMER_ENGINE" \
        "transformer-engine-cu12==$TRANSFORMER_ENGINE"; fi \
    && if [[ -n "$APEX" ]]; then wheel "apex @ git+https://github.com/NVIDIA/apex@$APEX"; fi

# no CUDA packages: torch comes from PyTorch's index for CPUs
FROM ${PYTHON} AS cpu
ENV PIP_NO_CACHE_DIR=1
# compilers are for torch.compile and for the audit of dry runs
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY --from=source /workspace ./
# hadolint ignore=DL3042
RUN pip install "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu && pip install -e . \
    && useradd --uid 10001 --create-home pangu && mkdir runs && chown pangu runs
USER 10001
CMD ["python", "pretrain.py", "--help"]

# the last stage is what `docker build` makes
FROM ${CUDA}-runtime AS cuda
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
# compilers are for Triton and for the audit of dry runs, numactl for torchrun's --numa-binding
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ numactl && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY --from=source /workspace ./
COPY --from=kernels /wheels /tmp/wheels
# hadolint ignore=DL3042,DL3013
RUN pip install -e . && find /tmp/wheels -name "*.whl" -exec pip install {} + && rm -rf /tmp/wheels \
    && useradd --uid 10001 --create-home pangu && mkdir runs && chown pangu runs
USER 10001
CMD ["python", "pretrain.py", "--help"]

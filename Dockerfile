# lakh in a container, for a CPU or for NVIDIA GPUs:
#
#   docker build --target cpu  -t lakh:cpu  .     # training and serving on CPUs, corpora, evaluation, plans
#   docker build --target cuda -t lakh:cuda .     # torch with its CUDA libraries; run with --gpus all
#   docker run --rm lakh:cpu doctor
#
# deploy/kubernetes names these two images.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ git iproute2 tini \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 LAKH_NATIVE=require
RUN useradd --create-home --uid 1000 lakh
WORKDIR /build

FROM base AS cpu
# PyTorch's own index has wheels without CUDA; --build-arg TORCH_INDEX= takes PyPI's.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY . .
RUN pip install -c constraints.txt '.[all,dashboard]' && rm -rf /build/*
USER lakh
WORKDIR /home/lakh
ENTRYPOINT ["tini", "--", "lakh"]
CMD ["--help"]

FROM base AS cuda
COPY constraints.txt ./
RUN pip install -c constraints.txt torch
COPY . .
RUN pip install -c constraints.txt '.[all,dashboard]' && rm -rf /build/*
USER lakh
WORKDIR /home/lakh
ENTRYPOINT ["tini", "--", "lakh"]
CMD ["--help"]

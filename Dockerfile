# lakh in a container, for a CPU or for NVIDIA GPUs:
#
#   docker build --target cpu  -t lakh:cpu  .     # training and serving on CPUs, corpora, evaluation, plans, dashboard
#   docker build --target cuda -t lakh:cuda .     # torch with its CUDA libraries; run with --gpus all
#   docker run --rm lakh:cpu doctor
#
# deploy/kubernetes and deploy/skypilot name these two images; push them to the registry that they name.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS base
# g++: torch.compile and Triton call it at run time. Debian removes old versions from its mirrors, so none are pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ git iproute2 tini \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 lakh

# The wheel with the native core, built once for both images.
FROM base AS wheel
WORKDIR /build
COPY . .
RUN LAKH_NATIVE=require pip wheel --no-deps -w /wheels .

FROM base AS cpu
COPY constraints.txt /tmp/
# PyTorch's own index has wheels without CUDA; --build-arg TORCH_INDEX= takes PyPI's.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install -c /tmp/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt "$(echo /wheels/lakh-*.whl)[all,dashboard]"
USER 1000
WORKDIR /home/lakh
ENTRYPOINT ["tini", "--", "lakh"]
CMD ["--help"]

FROM base AS cuda
COPY constraints.txt /tmp/
RUN pip install -c /tmp/constraints.txt torch
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt "$(echo /wheels/lakh-*.whl)[all,dashboard]"
USER 1000
WORKDIR /home/lakh
ENTRYPOINT ["tini", "--", "lakh"]
CMD ["--help"]

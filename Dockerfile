# One image for every role of DOLL: `docker run doll:local worker --any-slot`, `docker run doll:local ps`, ...
#
#   docker build -t doll:local .                                        torch's CPU build
#   docker build -t doll:local --build-arg TORCH_BACKEND=lock .         torch as pinned by the lock (on x86-64: CUDA)
#   docker build -t doll:local --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:... .     a base image by digest
#
# For x86-64 and arm64 (a Mac with Apple silicon, Graviton): deploy/wheels.txt lists the packages' wheels.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# Packages without a wheel for arm64 are compiled here, from sources checked against the lock's hashes; the image has no compiler.
FROM ${PYTHON_IMAGE} AS compile
WORKDIR /src
COPY requirements.lock ./
RUN mkdir /wheels \
    && if [ "$(uname -m)" != x86_64 ]; then \
         apt-get update \
         && apt-get install --yes --no-install-recommends gcc libc6-dev \
         && awk '/^[a-z]/ {keep = /^faust-streaming==/} keep' requirements.lock > sources.txt \
         && python -m pip wheel --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
              --wheel-dir /wheels --requirement sources.txt; \
       fi

FROM ${PYTHON_IMAGE} AS build
# The same version as in the Makefile.
ARG UV_VERSION=0.13.8
# A value of uv's --torch-backend (cpu, cu130, xpu, ...), or `lock`.
ARG TORCH_BACKEND=cpu
ENV UV_CACHE_DIR=/var/cache/uv \
    UV_LINK_MODE=copy \
    UV_NO_MANAGED_PYTHON=1 \
    UV_COMPILE_BYTECODE=1 \
    VIRTUAL_ENV=/opt/doll
RUN python -m pip install --no-cache-dir --disable-pip-version-check "uv==${UV_VERSION}"
WORKDIR /src
COPY requirements.lock pyproject.toml ./
COPY --from=compile /wheels /wheels
# The lock constrains the versions, and each package is checked against its hashes; development dependencies are not
# installed. Torch's other builds come from torch's own index with other hashes and without the lock's CUDA packages, in the
# lock's version.
RUN --mount=type=cache,target=/var/cache/uv \
    uv venv "${VIRTUAL_ENV}" \
    && find /wheels -name '*.whl' -exec uv pip install --no-deps {} + \
    && if [ "${TORCH_BACKEND}" = lock ]; then \
         cp requirements.lock constraints.txt \
         && uv pip install --no-build --constraint constraints.txt --requirements pyproject.toml --extra avro --extra drift --extra join --extra kubernetes --extra otel --extra plots --extra protobuf --extra provision --extra serve; \
       else \
         awk '/^[a-z]/ {skip = /^(torch|triton|nvidia-|cuda-)/} !skip' requirements.lock > constraints.txt \
         && uv pip install --no-build --constraint constraints.txt \
              --torch-backend "${TORCH_BACKEND}" --requirements pyproject.toml --extra avro --extra drift --extra join --extra kubernetes --extra otel --extra plots --extra protobuf --extra provision --extra serve "$(awk '/^torch==/ {print $1}' requirements.lock)"; \
       fi
COPY README.md LICENSE ./
COPY examples examples
COPY doll doll
RUN --mount=type=cache,target=/var/cache/uv \
    uv pip install --no-deps --build-constraints constraints.txt .

FROM ${PYTHON_IMAGE}
ARG DOLL_UID=10001
# runs/ belongs to the user before a volume is mounted on it: an empty volume inherits its owner.
RUN groupadd --gid "${DOLL_UID}" doll \
    && useradd --uid "${DOLL_UID}" --gid doll --no-create-home --home-dir /tmp --shell /usr/sbin/nologin doll \
    && install --directory --owner doll --group doll /var/lib/doll /var/lib/doll/runs
COPY --from=build /opt/doll /opt/doll
ENV PATH=/opt/doll/bin:${PATH} \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DOLL_HEALTH_PORT=8080
# As a number, so that a cluster that forbids root can verify it.
USER ${DOLL_UID}:${DOLL_UID}
WORKDIR /var/lib/doll
# A process answers as soon as it has imported torch and connected to its services. The check is /healthz, since a restart does
# not help while services are unavailable. A process that is stuck exits by itself.
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 CMD ["doll", "health"]
ENTRYPOINT ["doll"]
CMD ["--help"]

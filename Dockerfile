# nvplug as an image of one file. Nothing of the machine that builds it gets in:
#   docker build --build-arg COMMIT=$(git describe --always --dirty) .
# The arm64 image is made by the same words, on or for an arm64 machine.

FROM python:3.13-slim-trixie AS build
RUN apt-get update --quiet \
 && apt-get install --quiet --yes --no-install-recommends binutils gcc libc6-dev make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# First what changes rarely, so that a new commit does not install everything anew.
COPY Makefile pyproject.toml requirements.lock requirements-build.lock ./
COPY freeze/__init__.py freeze/bundle.py freeze/
RUN make build-environment
COPY . .
ARG COMMIT=
RUN make binary COMMIT="$COMMIT"
# nvidia-device-plugin: charts and manifests made for NVIDIA's image call it by this name.
RUN mkdir --parents /image/usr/bin \
 && cp dist/nvplug /image/usr/bin/ \
 && ln --symbolic nvplug /image/usr/bin/nvidia-device-plugin

FROM scratch
COPY --from=build /image/ /
# What makes the nvidia runtime put the driver's library and all devices into the container.
ENV PATH=/usr/bin NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility
ARG COMMIT=
LABEL org.opencontainers.image.title="nvplug" \
      org.opencontainers.image.description="The NVIDIA GPU device plugin for Kubernetes as one static executable" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$COMMIT"
ENTRYPOINT ["nvplug"]

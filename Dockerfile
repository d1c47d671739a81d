# SPDX-License-Identifier: Apache-2.0
#
# The image: the static agent, and of Debian no more than iptables with both of
# its backends and the libraries that they need. No shell, no package manager.
# It is built on the builder's platform for any other, without emulation.
#
# release/image builds it with buildah, podman or docker.

ARG GO_IMAGE=docker.io/library/golang:1.26-bookworm
ARG BASE_IMAGE=docker.io/library/debian:bookworm-slim

FROM --platform=$BUILDPLATFORM ${BASE_IMAGE} AS iptables
ARG TARGETARCH
COPY release/rootfs /usr/local/bin/
RUN rootfs "$TARGETARCH" /rootfs

FROM --platform=$BUILDPLATFORM ${GO_IMAGE} AS build
ARG TARGETARCH
ARG VERSION=devel
ARG COMMIT=unknown
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
COPY --from=iptables /rootfs /rootfs
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
	release/assemble "$TARGETARCH" /rootfs

FROM scratch
ARG VERSION=devel
ARG COMMIT=unknown
LABEL org.opencontainers.image.title=ip-masq-agent \
	org.opencontainers.image.description="Source NAT for Kubernetes nodes, by iptables or eBPF" \
	org.opencontainers.image.licenses="Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)" \
	org.opencontainers.image.version=$VERSION \
	org.opencontainers.image.revision=$COMMIT
ENV PATH=/usr/sbin:/usr/bin
COPY --from=build /rootfs /
USER 0:0
ENTRYPOINT ["/ip-masq-agent"]

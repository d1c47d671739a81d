# SPDX-License-Identifier: Apache-2.0
#
# Images and releases. Images are built by buildah, podman or docker, whichever
# is there; see release/image.

REGISTRY ?= registry.example.com
IMAGE ?= $(REGISTRY)/ip-masq-agent
ARCH ?= $(shell go env GOARCH)
ARCHES ?= amd64 arm64
export IMAGE_ARGS

# The time of what is built is that of the commit, so that it can be built again.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
export VERSION
export COMMIT

.PHONY: version
version: ## print the version: that of the git tag
	@echo $(VERSION)

.PHONY: image container
container: image
image: ## build the image REGISTRY/ip-masq-agent:VERSION for ARCH (root)
	@test/setup image
	release/image build $(IMAGE):$(VERSION) $(ARCH)

.PHONY: push
push: container ## build it and push it to REGISTRY
	release/image push $(IMAGE):$(VERSION)

.PHONY: all-build
all-build: ## write bin/ip-masq-agent-ARCH for all ARCHES
	$(foreach arch,$(ARCHES),GOARCH=$(arch) go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ip-masq-agent-$(arch) ./cmd/ip-masq-agent &&) true

.PHONY: all-container
all-container: ## build the images of all ARCHES
	@test/setup image
	$(foreach arch,$(ARCHES),release/image build $(IMAGE):$(VERSION)-$(arch) $(arch) &&) true

.PHONY: all-push
all-push: all-container ## build and push them, and a list of all as REGISTRY/ip-masq-agent:VERSION
	release/image push-list $(IMAGE):$(VERSION) $(ARCHES)

.PHONY: release
release: ## write programs, image archives, manifests, SBOMs and checksums into dist/
	@test/setup image
	release/build dist $(IMAGE) $(ARCHES)

# SPDX-License-Identifier: Apache-2.0

CLANG ?= clang-19
LLVM_STRIP ?= llvm-strip-19
CLANG_FORMAT ?= clang-format-19
GOLANGCI_VERSION := v2.15.0
GOLANGCI := $(CURDIR)/.cache/bin/golangci-lint-$(GOLANGCI_VERSION)

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)

C_FILES := $(wildcard bpf/*.h bpf/*.c test/bench/*.c)

export CLANG LLVM_STRIP
export BPF_INCLUDE = /usr/include/$(shell uname -m)-linux-gnu
export CGO_ENABLED ?= 0

.DEFAULT_GOAL := help

.PHONY: help
help: ## show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## write bin/ip-masq-agent; needs Go and nothing else
	go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ip-masq-agent ./cmd/ip-masq-agent

include release/release.mk

.PHONY: generate
generate: ## compile the eBPF programs (clang) and make their Go
	test/setup generate
	go generate ./bpf
	go -C test/bench generate .
	printf '// SPDX-License-Identifier: Apache-2.0\n\npackage bpf\n\n// Clang is the compiler of the committed objects.\nconst Clang = "%s"\n' \
		"$$($(CLANG) -dumpversion)" > bpf/clang.go

.PHONY: generate-check
generate-check: generate ## prove that what is committed is what the sources give
	git diff --exit-code -- bpf test/bench
	@test -z "$$(git status --porcelain -- bpf test/bench)" || { git status --short -- bpf test/bench; exit 1; }

.PHONY: test
test: ## run all tests that gate a change (root; sets itself up)
	test/setup test
	go test -count=1 -timeout 15m ./...
	go -C test/bench test -count=1 -timeout 10m ./...
	go -C test/kubernetes test -count=1 -timeout 5m ./manifests

.PHONY: test-all
test-all: ## the same and what takes longer
	test/setup test
	LONG_TESTS=1 go test -count=1 -timeout 60m ./...
	go -C test/bench test -count=1 -timeout 10m ./...
	go -C test/kubernetes test -count=1 -timeout 5m ./manifests
	$(MAKE) kernels

.PHONY: soak
soak: ## let everything happen at once to a busy node for ten minutes (root)
	test/setup test
	SOAK=10m go test -count=1 -timeout 30m -v -run '^TestSoak$$' ./test/lifecycle

.PHONY: lint
lint: $(GOLANGCI) ## run the linters and format checks
	test/setup lint
	GOARCH=arm go vet ./...
	$(GOLANGCI) run ./...
	cd test/bench && $(GOLANGCI) run ./...
	cd test/kubernetes && $(GOLANGCI) run ./...
	$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
	shellcheck test/setup test/common.sh test/demo/run test/kernels/run test/kernels/fetch .ci/run \
		release/image release/rootfs release/assemble release/build release/image-file \
		test/kubernetes/base-images test/kubernetes/build-kubernetes test/kubernetes/cluster test/kubernetes/run

$(GOLANGCI):
	mkdir -p $(@D)
	GOBIN=$(@D) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv .cache/bin/golangci-lint $@

.PHONY: fmt
fmt: $(GOLANGCI) ## format Go and C
	$(GOLANGCI) fmt ./...
	$(CLANG_FORMAT) -i $(C_FILES)

.PHONY: demo
demo: ## show both datapaths at work in throw-away namespaces (root; sets itself up)
	@test/setup demo
	@$(MAKE) --no-print-directory build
	@test/demo/run bin/ip-masq-agent

.PHONY: kernels
kernels: ## load, attach and translate on Debian's kernels in qemu (root; sets itself up)
	test/kernels/run

.PHONY: e2e
e2e: ## run the image on two nodes of real Kubernetes (root; sets itself up)
	test/kubernetes/run

.PHONY: e2e-short
e2e-short: ## the same on one node
	test/kubernetes/run 1

.PHONY: bench bench-quick
bench: BENCH := -full
bench: ## measure all figures of all contenders, for docs/performance.md (root; a quarter of an hour)
bench-quick: BENCH := -quick
bench-quick: ## the same in two minutes, into dist/bench: to see that it works (root)
bench bench-quick: build
	test/setup test
	mkdir -p dist/bench && cp docs/performance.md dist/bench
	IP_MASQ_AGENT_BIN=$(CURDIR)/bin/ip-masq-agent go -C test/bench test -count=1 -timeout 60m -v -run '^TestBench$$' . \
		-args $(BENCH) -docs $(CURDIR)/$(if $(filter bench,$@),docs,dist/bench)

.PHONY: bench-smoke
bench-smoke: build ## compare the datapaths with each other and with plain routing (root; a minute)
	test/setup test
	IP_MASQ_AGENT_BIN=$(CURDIR)/bin/ip-masq-agent go -C test/bench test -count=1 -v -run '^TestSmoke$$' . -args -smoke

.PHONY: clean
clean: ## remove what was built
	rm -rf bin dist .cache

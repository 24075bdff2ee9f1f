# Every command by name; CI calls only these.
.PHONY: help run test soak build bench bench-scale bench-meta clean fmt install
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

run: ## build, start an embedded cluster, mount it, show it working (DIR=, MOUNT=, SERVERS=)
	@scripts/setup build
	cargo build --release -p torchfs-cli
	@scripts/run

build: ## leave target/release/torchfs
	@scripts/setup build
	cargo build --release -p torchfs-cli

PREFIX ?= /usr/local
SBINDIR ?= /sbin

install: ## put what was built under PREFIX, and the names that mount(8) looks for under /sbin (PREFIX=, DESTDIR=)
	@test -x target/release/torchfs || { echo "there is no target/release/torchfs; run make build first" >&2; exit 1; }
	install -D -m 755 target/release/torchfs $(DESTDIR)$(PREFIX)/bin/torchfs
	install -d $(DESTDIR)$(SBINDIR)
	ln -sfn $(PREFIX)/bin/torchfs $(DESTDIR)$(SBINDIR)/mount.torchfs
	ln -sfn $(PREFIX)/bin/torchfs $(DESTDIR)$(SBINDIR)/mount.fuse.torchfs

test: ## format, lints, unit tests, real processes; what CI runs
	@scripts/setup test
	@scripts/test

soak: ## the same tests with full counts and fresh, printed seeds
	@scripts/setup test
	@SOAK=1 TEST_DEADLINE=$${TEST_DEADLINE:-28800} scripts/test

bench: ## measure against the local disk (ARGS="--quick", "--peer NAME=DIR", "--json")
	@scripts/setup test
	cargo build --release -p torchfs-cli
	@python3 bench/run.py $(ARGS)

bench-scale: ## measure how bandwidth grows with data servers, as root (ARGS="--quick", "--only replicas:1", "--json")
	@scripts/setup test
	cargo build --release -p torchfs-cli
	@python3 bench/scale.py $(ARGS)

bench-meta: ## measure the metadata service on its own disk and in PostgreSQL (ARGS="--quick", "--takeovers 10", "--json")
	@scripts/setup test
	cargo build --release -p torchfs-cli
	@python3 bench/meta.py $(ARGS)

fmt: ## format the code
	cargo fmt --all

clean: ## remove what was built (the test programs in the cache stay)
	cargo clean

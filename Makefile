# Everything happens in .venv, which the first target that needs it makes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
RUST := $(shell find rust -name '*.rs') Cargo.toml Cargo.lock
BUILT := .venv/.built

.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

.venv/bin/maturin: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prime-io needs Python >= 3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2'
	touch $@

$(BUILT): .venv/bin/maturin $(RUST) pyproject.toml
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --release --extras dev
	touch $@

.PHONY: help build demo test proof torture lint bench bench-check wheel clean

build: $(BUILT) ## set up .venv and build the extension (release)

demo: $(BUILT) ## a real asynchronous RL run that is killed in the middle and resumes
	$(BIN)/python -m examples.async_rl $(ARGS)

test: $(BUILT) ## cargo test for the core, then pytest (a short form of the demo among it)
	cargo test --quiet
	$(BIN)/python -m pytest -q $(ARGS)

proof: $(BUILT) ## kill small runs at every named step, resume them, and judge what is left (minutes)
	$(BIN)/python -m tests.proof $(ARGS)

torture: $(BUILT) ## the same with fresh seeds until it is stopped, or ARGS='--minutes 60'
	$(BIN)/python -m tests.proof --torture $(ARGS)

lint: $(BUILT) ## rustfmt, clippy, ruff, mypy and stubtest
	cargo fmt --check
	cargo clippy --quiet --all-targets -- -D warnings
	cargo clippy --quiet --all-targets --all-features -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest prime_io._native --allowlist tests/stubtest.allow --ignore-unused-allowlist
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check licenses bans sources; \
	else echo "cargo-deny is not installed: licenses and bans not checked"; fi

BENCH := -m pytest -q benches --benchmark-enable --benchmark-quiet
# Those without floors: they have targets of their own, in other units.
UNRATED := --ignore benches/bench_event_loop.py --ignore benches/bench_queue.py

bench: $(BUILT) ## benchmarks against what a user would pick instead: target/bench.md (a quarter of an hour)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[bench]' --no-build-isolation
	$(BIN)/python $(BENCH) --benchmark-json=target/bench.json $(ARGS)
	$(BIN)/python benches/report.py target/bench.json target/bench.md

bench-check: $(BUILT) ## a short form of it (minutes): a ratio below its floor fails
	$(BIN)/python $(BENCH) $(UNRATED) --short --benchmark-json=target/bench-check.json $(ARGS)

wheel: .venv/bin/maturin ## one abi3 wheel for CPython >= 3.11 into dist/
	$(BIN)/maturin build --release --out dist

clean: ## remove what was built
	rm -rf .venv target dist

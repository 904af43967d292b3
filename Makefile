# `make bench` and `make test` are all a fresh clone needs. The environment lives in .venv.

PYTHON ?= python3
BIN := .venv/bin
OUT ?= results/gpu

.PHONY: bench test lint benchmark gpu clean

bench: .venv/installed
	$(BIN)/attnbench sweep --preset quick
	$(BIN)/attnbench report latest

test: lint
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Speed is measured here and never asserted in a test.
benchmark: .venv/installed
	$(BIN)/pytest benchmarks -o addopts= --benchmark-only --benchmark-columns=min,median,iqr,rounds

# One GPU, no network: uses the python3 that is there and its torch, installs nothing, and leaves
# at most eight files in OUT.
gpu:
	@mkdir -p $(OUT)
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -o addopts= -q -m gpu tests > $(OUT)/gpu-tests.log 2>&1; \
	  tail -3 $(OUT)/gpu-tests.log
	rm -rf $(OUT)/.run
	PYTHONPATH=$(CURDIR) $(PYTHON) -m attnbench sweep --preset gpu --device cuda \
	  --output $(OUT)/.run --name gpu > $(OUT)/gpu-sweep.log 2>&1; \
	  code=$$?; tail -5 $(OUT)/gpu-sweep.log; test $$code -le 1
	PYTHONPATH=$(CURDIR) $(PYTHON) -m attnbench report $(OUT)/.run/gpu
	cp $(OUT)/.run/gpu/run.json $(OUT)/.run/gpu/records.jsonl $(OUT)/.run/gpu/report.html \
	  $(OUT)/.run/gpu/report.md $(OUT)/
	tar -C $(OUT)/.run/gpu -czf $(OUT)/plots.tar.gz plots
	rm -rf $(OUT)/.run

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

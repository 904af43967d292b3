# `make bench` and `make test` are all a fresh clone needs. The environment lives in .venv.

PYTHON ?= python3
BIN := .venv/bin
OUT ?= results/gpu

.PHONY: bench test lint mutants gate benchmark validate gpu gpu-verify clean

bench: .venv/installed
	$(BIN)/attnbench sweep --preset quick
	$(BIN)/attnbench report latest

# One process a core; whole files, so that what a file's tests share is made once.
test: lint
	$(BIN)/pytest -n auto --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Does a test notice each of these deliberately broken variants of the package? About five minutes.
mutants: .venv/installed
	$(BIN)/python -m tests.mutants --jobs 2

# Is the working tree slower, larger or wrong, held against BASE (or where its branch began)?
# Advisory: it says so, and ends with 0.
gate: .venv/installed
	$(BIN)/attnbench gate $(if $(BASE),--base $(BASE)) $(if $(BUDGET),--budget $(BUDGET)) --advisory

# Speed is measured here and never asserted in a test.
benchmark: .venv/installed
	$(BIN)/pytest tests/benchmarks -o addopts= --benchmark-only --benchmark-columns=min,median,iqr,rounds

# Evidence for our own rules: how often times, verdicts on growth and the gate are wrong. The parts
# are timer (20 minutes), tools (minutes), scaling (minutes), laws (minutes) and gate (hours); and
# perplexity (ten minutes), which trains small models for the notes' claims about those; positions
# draws docs/positions.md's tables from a run, approximation (a minute) errors against features and
# rank. All but tools, scaling, positions and approximation go on where they stopped. Without PART the
# statistical tests. ARGS goes to the part: make validate PART=scaling ARGS=--help
validate: .venv/installed
	$(BIN)/python -m $(if $(PART),tests.validation $(PART) $(ARGS),pytest tests/validation $(ARGS))

# One GPU, no network: uses the python3 that is there and its torch, installs nothing, and leaves
# at most eight files in OUT.
gpu:
	@mkdir -p $(OUT)
	@rm -rf $(OUT)/.run
	@export PYTHONPATH=$(CURDIR); status=0; \
	$(PYTHON) -m pytest -o addopts= -q -m gpu tests/test_gpu.py tests/test_gate_gpu.py > $(OUT)/gpu-tests.log 2>&1 || status=1; \
	tail -3 $(OUT)/gpu-tests.log; \
	$(PYTHON) -m attnbench doctor --device cuda --json > $(OUT)/doctor.json 2>> $(OUT)/gpu-tests.log || true; \
	$(PYTHON) -m attnbench sweep --preset gpu --device cuda --output $(OUT)/.run --name gpu \
	  > $(OUT)/gpu-sweep.log 2>&1 || status=1; \
	tail -8 $(OUT)/gpu-sweep.log; \
	$(PYTHON) -m attnbench report gpu --output $(OUT)/.run && \
	cp $(OUT)/.run/gpu/run.json $(OUT)/.run/gpu/records.jsonl $(OUT)/.run/gpu/report.html \
	  $(OUT)/.run/gpu/report.md $(OUT)/ && \
	tar -C $(OUT)/.run/gpu -czf $(OUT)/plots.tar.gz plots && rm -rf $(OUT)/.run && exit $$status

# The same for laws: verdicts and claims from a sweep of their own, in bf16; at most eight files.
gpu-verify:
	@mkdir -p $(OUT)
	@rm -rf $(OUT)/.run
	@export PYTHONPATH=$(CURDIR); status=0; \
	$(PYTHON) -m attnbench verify --sweep --device cuda --output $(OUT)/.run --name verify-gpu \
	  > $(OUT)/verify.txt 2> $(OUT)/verify.log || status=$$?; \
	tail -3 $(OUT)/verify.txt; tail -2 $(OUT)/verify.log; \
	$(PYTHON) -m attnbench claims verify-gpu --output $(OUT)/.run > $(OUT)/claims.txt || true; \
	$(PYTHON) -m attnbench report verify-gpu --output $(OUT)/.run && \
	cp $(OUT)/.run/verify-gpu/run.json $(OUT)/.run/verify-gpu/records.jsonl \
	  $(OUT)/.run/verify-gpu/report.html $(OUT)/.run/verify-gpu/report.md $(OUT)/ && \
	tar -C $(OUT)/.run/verify-gpu -czf $(OUT)/plots.tar.gz plots && rm -rf $(OUT)/.run && exit $$status

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# `make bench` and `make test` are all a fresh clone needs. The environment lives in .venv.

PYTHON ?= python3
BIN := .venv/bin
OUT ?= results/gpu
LIMIT ?= 270

.PHONY: bench test lint mutants gate benchmark validate gpu gpu-rehearsal gpu-verify gpu-doctor gpu-test gpu-sweep \
  gpu-report gpu-check gpu-verify-sweep gpu-verdicts gpu-verify-report clean

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

# One GPU, no network: the python3 that is there with its torch; nothing is installed. The parts are
# apart: each leaves what it has found in OUT as it finds it and is ended after LIMIT seconds, so that
# the others have their turn whatever becomes of it. Called again, the sweep and the check go on
# where they were cut off. `gpu` runs its parts in this order and leaves eight files: gpu.log,
# doctor.json, check.txt, and in gpu/ run.json, records.jsonl, report.html, report.md, plots.tar.gz.
GPU := gpu-doctor gpu-test gpu-sweep gpu-report gpu-check
# The same for laws, by a sweep of their own: gpu.log, verify.txt, claims.txt, and the five of a run.
GPU_VERIFY := gpu-verify-sweep gpu-verdicts gpu-verify-report
ON_GPU = mkdir -p $(OUT); exec 2>> $(OUT)/gpu.log; echo "== $@" >&2; export PYTHONUNBUFFERED=1 \
  PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}; python="timeout -k 10 $(LIMIT) $(PYTHON)"; attnbench="$$python -m attnbench"
# What became of a part: its exit status, and the last lines of the log.
ENDED = status=$$?; tail -n 8 $(OUT)/gpu.log; echo "$@: exit $$status"; exit $$status

gpu gpu-verify:
	@status=0; for part in $(if $(filter gpu,$@),$(GPU),$(GPU_VERIFY)); do \
	  $(MAKE) --no-print-directory $$part || status=1; done; exit $$status

gpu-doctor:
	@$(ON_GPU); $$attnbench doctor --device cuda --json > $(OUT)/doctor.json; status=$$?; \
	grep '"verdict"' $(OUT)/doctor.json >&2; (exit $$status); $(ENDED)

gpu-test:
	@$(ON_GPU); $$python -m pytest -o addopts= -q -m gpu tests/test_gpu.py tests/test_gate_gpu.py >&2; $(ENDED)

gpu-sweep gpu-report: RUN := gpu
gpu-verify-sweep gpu-verify-report: RUN := verify-gpu

# A cell that hangs does so twice, under the profiler and where it is timed: both fit into LIMIT.
gpu-sweep gpu-verify-sweep:
	@$(ON_GPU); if [ -e $(OUT)/$(RUN)/run.json ]; then what="--resume $(RUN)"; \
	else rmdir $(OUT)/$(RUN); what="--preset $(RUN) --device cuda --timeout 100 --name $(RUN)"; fi; \
	$$attnbench sweep $$what --output $(OUT) >&2; $(ENDED)

gpu-report gpu-verify-report:
	@$(ON_GPU); $$attnbench report $(RUN) --output $(OUT) >&2 && \
	tar -C $(OUT)/$(RUN) -czf $(OUT)/$(RUN)/plots.tar.gz plots && rm -r $(OUT)/$(RUN)/plots; $(ENDED)

gpu-verdicts:
	@$(ON_GPU); $$attnbench claims verify-gpu --output $(OUT) > $(OUT)/claims.txt; \
	$$attnbench verify verify-gpu --output $(OUT) > $(OUT)/verify.txt; $(ENDED)

# One family of implementations after another, in each dtype: those that are done are left out, and
# all must have passed. They share LIMIT, which is less than all of them take where cuDNN makes a
# plan for every shape: what is cut off comes first when called again.
FAMILIES := import itertools, json, sys; \
  found = sorted(json.load(sys.stdin)["implementations"], key=lambda x: x["family"]); \
  print(*(",".join(x["name"] for x in of) for _, of in itertools.groupby(found, lambda x: x["family"])))
gpu-check:
	@$(ON_GPU); done=$(OUT)/check.txt; touch $$done; end=$$(($$(date +%s) + $(LIMIT))); open=0; \
	families=$$($$attnbench list --json | $(PYTHON) -c '$(FAMILIES)'); [ -n "$$families" ] || open=1; \
	for dtype in bfloat16 float16 float32; do for impls in $$families; do \
	  if ! grep -q "^$$dtype $$impls: exit" $$done; then \
	    left=$$((end - $$(date +%s))); [ $$left -gt 0 ] || { open=1; echo "cut off: make gpu-check goes on" >&2; break 2; }; \
	    timeout -k 10 $$left $$attnbench check --device cuda --dtypes $$dtype --impls $$impls >> $$done; code=$$?; \
	    [ $$code -gt 1 ] || echo "$$dtype $$impls: exit $$code" >> $$done; \
	  fi; grep -q "^$$dtype $$impls: exit 0" $$done || open=1; \
	done; done; (exit $$open); $(ENDED)

# All of that on a CPU, before simulated GPUs: does each part work, is each time the true one, and
# how long would a GPU take? PROFILES are among H100, H200, A100, RTX4090 and L4; the first has the
# whole preset, which takes a quarter of an hour.
gpu-rehearsal: .venv/installed
	$(BIN)/python -m tests.rehearsal $(PROFILES)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# `make bench` and `make test` are all a fresh clone needs. The environment lives in .venv.
# No path here is absolute: the clone may lie where there are spaces.

PYTHON ?= python3
BIN := .venv/bin
OUT ?= results/gpu
LIMIT ?= 270

.PHONY: bench test unit test-fresh lint mutation gate history benchmark validate chaos gpu gpu-verify clean

bench: .venv/installed
	$(BIN)/attnbench sweep --preset quick
	$(BIN)/attnbench report latest

test: lint
	@$(MAKE) --no-print-directory unit

# One process a core; an idle one takes work from the others. SLOW=yes also runs the tests marked slow.
unit: .venv/installed
	$(BIN)/pytest -n auto --dist worksteal $(if $(SLOW),,-m "not slow")

# All of that in a new clone of HEAD, as on a machine where nobody has run before; narrower with
# ISA=avx2 or sse4 (the instructions that libraries may use) and CPUS=0 (the cores). See tests/fresh.sh.
test-fresh:
	bash tests/fresh.sh $(if $(ISA),--isa $(ISA)) $(if $(CPUS),--cpus $(CPUS)) make test

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# How many small changes of a deciding module do its tests notice? MODULE is gate/decide, worker/reference,
# theory/costs, base/stats or execution/supervision. cosmic-ray draws the changes, always the same ones of
# the same source, for SECONDS or until CHANGES of them are tried.
SECONDS ?= 300
CHANGES ?= 1000
mutation: .venv/installed build/mutation/installed
	build/mutation/bin/python tests/mutation.py "$(MODULE)" $(SECONDS) $(CHANGES)

build/mutation/installed:
	$(PYTHON) -m venv build/mutation
	build/mutation/bin/pip install --quiet cosmic-ray==8.7.0
	touch $@

# Is the working tree slower, larger or wrong, held against BASE (or where its branch began)?
# Advisory: it says so, and ends with 0.
gate: .venv/installed
	$(BIN)/attnbench gate $(if $(BASE),--base $(BASE)) $(if $(BUDGET),--budget $(BUDGET)) --advisory

# One more run of the preset quick in the history under HISTORY, which is drawn again (two minutes).
HISTORY ?= results/history
history: .venv/installed
	$(BIN)/attnbench sweep --preset quick
	$(BIN)/attnbench history $(HISTORY) --add latest
	$(BIN)/attnbench history $(HISTORY) --write

# Speed is measured here and never asserted in a test.
benchmark: .venv/installed
	$(BIN)/pytest tests/benchmarks -o addopts= --benchmark-only --benchmark-columns=min,median,iqr,rounds

# Evidence for our own rules: how often verdicts on growth, the gate and comparisons are wrong, and
# more. CONTRIBUTING.md says what each part does; and how long it
# takes. Those that take long go on where they stopped. Without PART their short forms run. ARGS goes to the part:
# make validate PART=laws ARGS=--help
validate: .venv/installed
	$(BIN)/python -m $(if $(PART),tests.validation $(PART) $(ARGS),pytest tests/validation $(ARGS))

# A sweep over hostile implementations whose runner and workers are killed 20 times; then one on a
# Ray cluster of two nodes of which 5 are killed. A quarter of an hour.
chaos: .venv/installed
	$(BIN)/python -m tests.validation chaos --kills 20
	$(BIN)/python -m tests.validation chaos --on ray --kills 5

# One GPU, no network: the python3 that is there with its torch; nothing is installed. A quarter of an
# hour. The parts are apart: each leaves what it has found in OUT as it finds it and is ended after LIMIT
# seconds, so that the others have their turn whatever becomes of it. What each leaves: docs/gpu.md.
GPU := gpu-doctor gpu-probe gpu-test gpu-check gpu-gate gpu-advise gpu-decode
# The preset `gpu` and its report; called again, the sweep goes on where it was cut off.
GPU_SWEEP := gpu-sweep gpu-report
# The same for laws, by a sweep of their own.
GPU_VERIFY := gpu-verify-sweep gpu-verdicts gpu-verify-report
ON_GPU = OUT="$(OUT)" LIMIT="$(LIMIT)" PYTHON="$(PYTHON)" sh tests/gpu.sh

gpu gpu-verify:
	@status=0; for part in $(if $(filter gpu,$@),$(GPU),$(GPU_VERIFY)); do \
	  $(ON_GPU) $$part; case $$? in 0) ;; 64) exit 64;; *) status=1;; esac; done; exit $$status

.PHONY: $(GPU) $(GPU_SWEEP) $(GPU_VERIFY)
$(GPU) $(GPU_SWEEP) $(GPU_VERIFY):
	@$(ON_GPU) $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

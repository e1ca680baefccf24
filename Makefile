# Every target makes .venv itself when it is missing or older than the dependency lists.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BENCHMARKS = $(filter-out fuzz model_fuzz ops published,$(basename $(notdir $(shell grep -l "^    raise SystemExit(" benchmarks/*.py))))
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint format bench fuzz ops gpu
.DELETE_ON_ERROR:

$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq torch==2.13.0
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.stamp
	$(PY) -m examples.demo

test: $(VENV)/.stamp
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.stamp
	@mkdir -p out/bench
	@set -e; for name in $(BENCHMARKS); do echo "== benchmarks.$$name"; $(PY) -m benchmarks.$$name --json out/bench/$$name.json; done

fuzz: $(VENV)/.stamp
	$(PY) -m benchmarks.fuzz
	$(PY) -m benchmarks.model_fuzz

ops: $(VENV)/.stamp
	$(PY) -m benchmarks.ops

# Another PY (`make gpu PY=python3`) is taken as it is: it has what is needed.
gpu: $(if $(filter $(VENV)/%,$(PY)),$(VENV)/.stamp)
	$(PY) -m benchmarks.gpu $(if $(PART),--only '^$(PART) ') --json out/gpu$(if $(PART),-$(PART)).json

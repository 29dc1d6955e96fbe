PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dependencies

.PHONY: help install demo test lint types unit test-long bench clean

help:
	@echo "make demo       train, kill three ways, resume, compare bit for bit"
	@echo "make test       linter, type checker and the test suite"
	@echo "make test-long  the long suites (every crash point, soak)"
	@echo "make bench      everstep beside other checkpoint engines: the table of aims, with pictures (under 20 minutes)"

$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[dev]" --config-settings editable_mode=strict
	touch $@

# A strict editable install links file by file, so it is made anew each time: a new module is then found.
install: $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e . --config-settings editable_mode=strict

demo: install
	$(BIN)/everstep demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy -p everstep

# Two at a time. What fails beside others, on a machine with few cores, has to pass alone.
unit: install
	$(BIN)/python -m pytest -m "not long" -n 2 --dist worksteal || $(BIN)/python -m pytest -m "not long" --last-failed --last-failed-no-failures none

test: lint types unit

test-long: install
	$(BIN)/python -m pytest -m long --timeout 1800

# The engines that everstep is measured beside; what does not install is left out by name.
$(VENV)/.rivals: constraints-rivals.txt $(STAMP)
	-$(BIN)/python -m pip install -q -c constraints.txt -c constraints-rivals.txt --no-build-isolation -e ".[rivals]" --config-settings editable_mode=strict
	touch $@

bench: install $(VENV)/.rivals
	$(BIN)/everstep bench run gpt-fp32 small-10k small-100k recovery training --json bench.json --html bench.html --png bench

clean:
	rm -rf $(VENV) build *.egg-info

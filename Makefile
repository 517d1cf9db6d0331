# make run | make test | make bench | make bench-transactions | make stock-peer | make image-test
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check proto bench simulate bench-transactions stock-peer image-test clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml
	@echo "Installing into $(VENV); this takes a minute or two ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

run: $(VENV)/.installed  ## start the embedded broker on 6650 and 8080, data under ./data
	exec $(BIN)/magnetar standalone --data-dir ./data

check: $(VENV)/.installed  ## style, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## everything that must hold
	$(BIN)/python -m pytest

proto: $(VENV)/.installed  ## regenerate the protobuf modules
	$(BIN)/python -m scripts.generate_proto

bench: $(VENV)/.installed  ## side by side with Apache Pulsar (needs Java 17 and Maven)
	$(BIN)/python -m bench

bench-transactions: $(VENV)/.installed  ## of that, only transactions
	$(BIN)/python -m bench --measure transactions --output build/bench/transactions.json

simulate: $(VENV)/.installed  ## seeds for MINUTES=10 from FROM=1, or one: SEED=n [TRACE=1]
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED) $(if $(TRACE),--trace),\
	  --from $(or $(FROM),1) --minutes $(or $(MINUTES),10))

stock-peer: $(VENV)/.installed  ## the stock-client suite against Apache Pulsar itself
	$(BIN)/python -m pytest tests/stock --peer

image-test: $(VENV)/.installed  ## build and try the container image (Debian, root)
	$(BIN)/python -m pytest tests/image -m image

clean:
	rm -rf $(VENV) build tests/stock/target

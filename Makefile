# make run | make test | make bench | make simulate | make fuzz | make stock-peer | make image-test
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check proto bench simulate simulate-mutants fuzz bench-transactions stock-peer image-test clean
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

simulate: $(VENV)/.installed  ## seeds for MINUTES=10 from FROM=1, or SEED=n [TRACE=1] [PROFILE=p] [LATE=1] [BREAK=rule]
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),\
	  --from $(or $(FROM),1) --minutes $(or $(MINUTES),10)) $(if $(TRACE),--trace) \
	  $(if $(PROFILE),--profile $(PROFILE)) $(if $(LATE),--late) $(if $(PLAIN),--plain) \
	  $(if $(BREAK),--break $(BREAK))

simulate-mutants: $(VENV)/.installed  ## each rule broken on purpose, MINUTES=5 at most to find each
	$(BIN)/python -m tests.simulation --break all --from $(or $(FROM),1) --minutes $(or $(MINUTES),5) \
	  $(if $(PROFILE),--profile $(PROFILE))

fuzz: $(VENV)/.installed  ## mutated frames of a seed drawn anew, or of SEED=n
	MAGNETAR_FUZZ_SEED=$(or $(SEED),random) $(BIN)/python -m pytest tests/fuzz -s

stock-peer: $(VENV)/.installed  ## the stock-client suite against Apache Pulsar itself
	$(BIN)/python -m pytest tests/stock --peer

image-test: $(VENV)/.installed  ## build and try the container image (Debian, root)
	$(BIN)/python -m pytest tests/image -m image

clean:
	rm -rf $(VENV) build tests/stock/target

# make run | test | test-client | test-pipeline | test-cluster | cluster-faults | bench | bench-cluster | simulate | fuzz | stock-peer | client-peer | image-test
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-client test-pipeline pipeline-kill pipeline-compact test-cluster cluster-faults offload-kills check proto
.PHONY: bench bench-transactions bench-client bench-pipeline bench-cluster simulate simulate-mutants fuzz
.PHONY: stock-peer client-peer image-test clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml
	@echo "Installing into $(VENV); 1.4 GB, which takes some minutes ..."
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

test: check  ## everything that must hold of the broker, and the cores of the client
	$(BIN)/python -m pytest --ignore=tests/client --ignore=tests/interop --ignore=tests/pipeline

test-client: $(VENV)/.installed  ## the Python client on a broker, and beside the stock Java client
	$(BIN)/python -m pytest tests/client tests/interop

test-pipeline: $(VENV)/.installed  ## source, sink and jobs on Spark (needs Java 17)
	$(BIN)/python -m pytest tests/pipeline

pipeline-kill: $(VENV)/.installed  ## every way that a driver, a task or a broker may die (some minutes)
	$(BIN)/python -m pytest tests/pipeline/kill tests/pipeline/test_harness.py -m "not cluster"

pipeline-compact: $(VENV)/.installed  ## a compaction of KEYS=1000000 keys, held against a dict
	$(BIN)/python -m pytest tests/pipeline/test_jobs.py -k a_dict_keeps --compact-keys=$(or $(KEYS),1000000)

test-cluster: $(VENV)/.installed  ## on real ZooKeeper, bookies and Oxia (needs Java 17, Maven and Go)
	$(BIN)/python -m pytest -m cluster
	$(BIN)/python -m pytest tests/stock --cluster=oxia
	$(BIN)/python -m pytest tests/stock --cluster=zookeeper
	$(if $(MAGNETAR_TEST_OXIA),$(BIN)/python -m pytest tests/stock --cluster=oxia-several,\
	  @echo "Several brokers ran on ZooKeeper only: MAGNETAR_TEST_OXIA names no Oxia server.")

cluster-faults: $(VENV)/.installed  ## each fault of a cluster ROUNDS=10 times, under load
	MAGNETAR_FAULT_ROUNDS=$(or $(ROUNDS),10) $(BIN)/python -m pytest tests/cluster/test_faults.py -m cluster -s

offload-kills: $(VENV)/.installed  ## a broker killed at each request to an object store while it offloads
	MAGNETAR_OFFLOAD_KILLS=16 $(BIN)/python -m pytest tests/chaos/test_sigkill_offload.py -s

proto: $(VENV)/.installed  ## regenerate the protobuf modules
	$(BIN)/python -m scripts.generate_proto

bench: $(VENV)/.installed  ## side by side with Apache Pulsar (needs Java 17 and Maven)
	$(BIN)/python -m bench

bench-transactions: $(VENV)/.installed  ## of that, only transactions
	$(BIN)/python -m bench --measure transactions --output build/bench/transactions.json

bench-client: $(VENV)/.installed  ## clients beside each other on one broker: ours, the stock Java one, the one from PyPI
	$(BIN)/python -m bench.client

bench-pipeline: $(VENV)/.installed  ## source and sink on Spark beside what Spark and the client can do; catching up; audits
	$(BIN)/python -m bench.pipeline

bench-cluster: $(VENV)/.installed  ## brokers on three real bookies and ZooKeeper
	$(BIN)/python -m bench.cluster

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

client-peer: $(VENV)/.installed  ## the Python client's tests against Apache Pulsar itself
	$(BIN)/python -m pytest tests/client tests/interop --peer

image-test: $(VENV)/.installed  ## build and try the container image (Debian, root)
	$(BIN)/python -m pytest tests/image -m image

clean:
	rm -rf $(VENV) build tests/stock/target

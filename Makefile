# make test (default), run, test-all, nightly, bench.  The ## line of a target says what it does.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,
PROJECTS := pyproject.toml magnetar_broker/pyproject.toml
BUILDER := 'hatchling>=1.27,<2' editables  # as [build-system] of both says

.PHONY: run spark check test test-all nightly test-client test-pipeline test-cluster
.PHONY: pipeline-kill pipeline-compact cluster-faults histories image-test simulate simulate-mutants fuzz attack
.PHONY: stock-peer client-peer bench bench-beside bench-transactions bench-client bench-pipeline bench-cluster bench-large-groups
.PHONY: bench-segments bench-auto-scale bench-replication bench-compaction bench-large-topics
.PHONY: proto sync lock audit clean
.DEFAULT_GOAL := test

# What is installed into $(VENV), by need: a broker and the client; what checks and tests need
# besides; Spark.  Each stamp file means that its packages are installed.  A newer pyproject.toml
# makes it stale.
.NOTPARALLEL:  # pip must not install into one environment twice at once.

# The pip that comes with Python is slow where an index has many files, and compiling everything
# takes longer than compiling what is imported.  The builder of the two packages is installed once,
# instead of once for each into an environment of its own.
define install
	@echo "Installing $(1) into $(VENV) (about $(2) MB) ..."
	@$(BIN)/pip --version > /dev/null 2>&1 || { $(PYTHON) -m venv --clear $(VENV) && \
	  $(BIN)/pip uninstall -qq --yes setuptools; }  # It comes with Python 3.11, and nothing needs it.
	@PIP_NO_COMPILE=1 $(BIN)/pip install -q --disable-pip-version-check --upgrade pip $(BUILDER)
	@set -o pipefail; PIP_NO_COMPILE=1 $(BIN)/pip install --disable-pip-version-check --no-build-isolation --check-build-dependencies \
	  --editable '.$(3)' --editable './magnetar_broker$(4)' | \
	  awk '$$1 == "Collecting" { sub(/[^A-Za-z0-9._-].*/, "", $$2); print "  " $$2 } \
	       /^Installing collected/ { print "  installing them ..." } { fflush() }'
	@touch $@
	@echo "Installed $(1): $(VENV) has $$(du -sm $(VENV) | cut -f 1) MB now."
endef

$(VENV)/.broker: $(PROJECTS)
	$(call install,what a single broker and the client need,135,,)

$(VENV)/.tests: $(PROJECTS)
	$(call install,what checks and tests need,400,[check$(COMMA)test],[cluster])
	@touch $(VENV)/.broker

$(VENV)/.spark: $(PROJECTS)
	$(call install,Spark and what its jobs need,1000,[spark],[cluster])
	@touch $(VENV)/.broker

spark: $(VENV)/.spark  ## install Spark and what the jobs on it need, beside the broker

run: $(VENV)/.broker  ## start the embedded broker on 6650 and 8080, data under ./data
	exec $(BIN)/magnetar standalone --data-dir ./data

# The tests: `python -m tests RUN` has the parts of each run.  PART=name runs one of them, WORKERS=n
# says how many processes run its tests.
ONE_PART = $(if $(PART),--part "$(PART)")
ifdef WORKERS
export MAGNETAR_TEST_WORKERS := $(WORKERS)
endif

check: $(VENV)/.tests  ## style, types, import rules
	$(BIN)/python -m tests check

test: $(VENV)/.tests  ## style, types, import rules, the embedded broker and the client: some minutes
	$(BIN)/python -m tests quick $(ONE_PART)

test-all: $(VENV)/.tests $(VENV)/.spark  ## the whole (needs Java 17, Maven and Go): some half an hour
	$(BIN)/python -m tests all $(ONE_PART)

nightly: $(VENV)/.tests $(VENV)/.spark  ## what takes hours, with seeds drawn anew
	$(BIN)/python -m tests nightly $(ONE_PART)

test-client: $(VENV)/.tests $(VENV)/.spark  ## the Python client on a broker, and beside the official Java client
	MAGNETAR_TEST_EFFORT=whole $(BIN)/python -m pytest -m "not nightly" tests/client tests/interop

test-pipeline: $(VENV)/.tests $(VENV)/.spark  ## source, sink and jobs on Spark (needs Java 17)
	$(BIN)/python -m tests all --part Spark

test-cluster: $(VENV)/.tests $(VENV)/.spark  ## on real ZooKeeper, bookies and Oxia (needs Java 17, Maven and Go)
	$(BIN)/python -m tests all --part cluster --part "Java client on clusters"

pipeline-kill: $(VENV)/.tests $(VENV)/.spark  ## every way that a driver, a task or a broker may die
	$(BIN)/python -m tests nightly --part "kill matrix of Spark"

pipeline-compact: $(VENV)/.tests $(VENV)/.spark  ## a compaction of a million keys, held against a dict
	$(BIN)/python -m tests nightly --part "a large compaction"

cluster-faults: $(VENV)/.tests  ## each fault of a cluster ten times, under load; with SECURE=1 once, and everything on
	$(BIN)/python -m tests nightly --part "$(if $(SECURE),faults of a secured cluster,faults of a cluster)"

histories: $(VENV)/.tests  ## TRANSACTIONS=10000 on a cluster with every fault, by two clients, judged; of a seed drawn anew, or SEED=n
	$(if $(SEED),MAGNETAR_TEST_SEED=$(SEED) )MAGNETAR_TEST_TRANSACTIONS=$(or $(TRANSACTIONS),10000) \
	  $(BIN)/python -m tests nightly --part "histories of a cluster"

proto: $(VENV)/.tests  ## regenerate the protobuf modules
	$(BIN)/python -m scripts.generate_proto

sync: $(VENV)/.tests  ## regenerate the clients for threads
	$(BIN)/python -m scripts.generate_sync

lock: $(VENV)/.tests  ## write the lock files of the image anew, of the newest releases that both projects allow
	$(BIN)/python -m scripts.lock_image

# pip-audit has thirty libraries of its own, so it gets an environment of its own.
audit:  ## ask the advisory database about the locked libraries, where it can be reached
	@$(PYTHON) -m venv build/audit && build/audit/bin/pip install -q --disable-pip-version-check 'pip-audit>=2.10,<3' || \
	  { echo "pip-audit cannot be installed here, so nothing was audited."; exit 0; }; build/audit/bin/python -m scripts.audit

bench: $(VENV)/.tests  ## side by side with Apache Pulsar (needs Java 17 and Maven)
	$(BIN)/python -m bench

bench-transactions: $(VENV)/.tests  ## of that, only transactions
	$(BIN)/python -m bench --measure transactions --output build/bench/transactions.json

bench-beside: $(VENV)/.tests  ## the broker of REV=HEAD~1 beside this tree's, PAIRS=5 [MEASURE=names] [QUICK=1] [PEER=1]; or SECURITY=tls or authorization
	$(BIN)/python -m bench.beside --rev "$(or $(REV),HEAD~1)" $(if $(PAIRS),--pairs $(PAIRS)) \
	  $(if $(MEASURE),--measure "$(MEASURE)") $(if $(QUICK),--quick) $(if $(PEER),--peer) $(if $(SECURITY),--security $(SECURITY))

bench-client: $(VENV)/.tests  ## clients beside each other on one broker: ours, the official Java one, the one from PyPI
	$(BIN)/python -m bench.client

bench-pipeline: $(VENV)/.tests $(VENV)/.spark  ## source and sink on Spark beside what Spark and the client can do; catching up; audits
	$(BIN)/python -m bench.pipeline

bench-cluster: $(VENV)/.tests  ## brokers on three real bookies and ZooKeeper
	$(BIN)/python -m bench.cluster

bench-large-groups: $(VENV)/.tests  ## how long others wait while a group of the largest size ends, and while segments load it
	$(BIN)/python -m bench.large_groups

bench-compaction: $(VENV)/.tests  ## a compaction of KEYS=10000000 keys: time, memory, disk, and what another topic notices
	$(BIN)/python -m bench.compaction $(if $(KEYS),--keys $(KEYS))

bench-large-topics: $(VENV)/.tests  ## 1,000,000 unacknowledged or delayed messages, 100,000 holes, 10,000 subscriptions; QUICK=1, MEASURE="holes"
	$(BIN)/python -m bench.large_topics $(if $(QUICK),--quick) $(if $(MEASURE),--measure $(MEASURE))

bench-segments: $(VENV)/.tests  ## what grows with the segments of a topic, with exponents; 10,000 topics at rest
	$(BIN)/python -m bench.segments

bench-replication: $(VENV)/.tests  ## geo-replication beside a client that copies, and beside Apache Pulsar's: catching up, delay, memory
	$(BIN)/python -m bench.replication

bench-auto-scale: $(VENV)/.tests  ## segments and rates over time, as a plot, of a topic whose load rises tenfold and falls again
	$(BIN)/python -m bench.auto_scale

simulate: $(VENV)/.tests  ## seeds for MINUTES=10 from FROM=1, or SEED=n [TRACE=1] [PROFILE=p] [LATE=1] [BREAK=rule]
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),\
	  --from $(or $(FROM),1) --minutes $(or $(MINUTES),10)) $(if $(TRACE),--trace) \
	  $(if $(PROFILE),--profile $(PROFILE)) $(if $(LATE),--late) $(if $(PLAIN),--plain) \
	  $(if $(BREAK),--break $(BREAK))

simulate-mutants: $(VENV)/.tests  ## each rule broken on purpose, MINUTES=5 at most to find each
	$(BIN)/python -m tests.simulation --break all --from $(or $(FROM),1) --minutes $(or $(MINUTES),5) \
	  $(if $(PROFILE),--profile $(PROFILE))

attack: $(VENV)/.tests  ## hostile clients beside a probe, on a broker each: NAME=partial-frames for one
	$(BIN)/python -m tests.attack $(NAME)

fuzz: $(VENV)/.tests  ## millions of mutated frames and tokens of a seed drawn anew, or of SEED=n
	MAGNETAR_TEST_EFFORT=nightly MAGNETAR_TEST_SEED=$(or $(SEED),$(shell date +%s)) $(BIN)/python -m pytest tests/fuzz -s

stock-peer: $(VENV)/.tests  ## the stock-client suite against Apache Pulsar itself
	$(BIN)/python -m pytest -m "not nightly" tests/java --peer

client-peer: $(VENV)/.tests $(VENV)/.spark  ## the Python client's tests against Apache Pulsar itself
	$(BIN)/python -m pytest -m "not nightly" tests/client tests/interop --peer

image-test: $(VENV)/.tests  ## build and try the container image (root on Debian 12; installs what that needs)
	CI=true $(BIN)/python -m pytest tests/image -m image

clean:
	rm -rf $(VENV) build tests/java/target *.egg-info

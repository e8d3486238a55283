# Two commands matter: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3.11
# Address of a package index to prefer (for example one with CPU builds of torch); empty = pip's own.
INDEX ?=
SEED ?= 0
export OMP_NUM_THREADS ?= 1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test parity kill lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(INDEX),--index-url $(INDEX)) -c constraints.txt -e '.[train,test,lint]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py --seed $(SEED)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

parity: setup
	$(BIN)/python -m tests.dist.long_parity
	$(BIN)/python -m tests.simulate --shipped --drawn 200
	$(BIN)/python -m pytest --all-pairs $(addprefix tests/dist/test_,programs.py attention_modes.py plan_mixes.py mode_layouts.py splits.py expert_splits.py split_cases.py split_traffic.py saved.py)
	$(BIN)/python -m tests.vlshard.exhaustive
	$(BIN)/python -m tests.vlshard.triangles --each 60
	$(BIN)/python -m tests.vlshard.fuzz

kill: setup
	$(BIN)/python -m tests.dist.kill --moments 60 --seed 0

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

bench: setup
	$(BIN)/python -m tests.benchmarks.bench_language
	$(BIN)/python -m tests.benchmarks.bench_planner
	$(BIN)/python -m tests.benchmarks.bench_scale
	$(BIN)/python -m tests.benchmarks.seed_table
	$(BIN)/python -m tests.benchmarks.seed_table --shapes small --losses 100
	$(BIN)/python -m tests.benchmarks.peers_table
	$(BIN)/python -m tests.benchmarks.bench_dealing
	$(BIN)/python -m tests.benchmarks.bench_memory
	$(BIN)/python -m tests.benchmarks.bench_split_memory
	$(BIN)/python -m tests.benchmarks.bench_reduce
	$(BIN)/python -m tests.benchmarks.bench_overlap
	$(BIN)/python -m tests.benchmarks.bench_doors

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache

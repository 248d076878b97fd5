# The commands of Annulus. Each first makes .venv when it is missing or its requirements
# changed, and needs a Python 3.12 on the PATH or under pyenv for that.
#
#   make train      run configs/tiny.py; CONFIG=configs/other.py ARGS="--config.x=1"
#   make test       the quick tests; ARGS="-k ring" picks some
#   make test-thorough  what starts runs, processes, compilers or interpreters, as CI does
#   make test-all   the slow tests too, which take hours
#   make test-range the library alone, in empty environments with the oldest and newest jax
#   make check      format, lint, types and quick tests, as a change must pass
#   make format     put the code into its format
#   make docs       the pages as a site, with an API page, in build/site
#   make venv       only make .venv; it and train take ACCELERATOR=tpu, gpu, rl, ray,
#                   buckets, wandb, tokamax

.PHONY: help train test test-thorough test-all test-range check lint format docs venv venv-dev
# The environment is made once, before whatever uses it.
.NOTPARALLEL:

ACCELERATOR =
ARGS =
CONFIG = configs/tiny.py
PYTHON = .venv/bin/python
# Every worker holds its own compiled programs, so more than 8 cost more than they give.
WORKERS = $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); \
	echo $$((n < 8 ? n : 8)))
# Tests simulate their devices on the CPU, unless JAX_PLATFORMS says otherwise. Kernels
# are interpreted in NumPy, whose threads would wait for those of the other workers.
PYTEST = OPENBLAS_NUM_THREADS=1 JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} \
	$(PYTHON) -m pytest -q -n $(WORKERS)

help:
	@sed -n 's/^#   //p' Makefile

train: venv
	$(PYTHON) train.py --config=$(CONFIG) $(ARGS)

# tests/support/tiers.py says which test is in which tier. By files, whose tests share
# programs; the slow tests share few.
test: venv-dev
	$(PYTEST) --dist loadfile -m "not slow and (quick or not thorough)" $(ARGS)

test-thorough: venv-dev
	$(PYTEST) --dist loadfile -m "thorough and not (quick or slow)" $(ARGS)

test-all: test test-thorough
	$(PYTEST) --dist worksteal -m slow $(ARGS)

test-range:
	tools/test_range.sh $(RANGE)

# The contracts in pyproject.toml are the import arrows.
check: lint test

lint: venv-dev
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyrefly check --summary=none
	.venv/bin/lint-imports --no-logo --no-cache
	$(PYTHON) -m tests.support.density

format: venv-dev
	$(PYTHON) -m ruff check --select I --fix .
	$(PYTHON) -m ruff format .

# What git knows is copied, so that links to source files are links of the site too.
# With --quiet mkdocs counts no warnings, and --strict lets them pass.
docs:
	@tools/make_venv.sh .venv-docs requirements/docs.txt
	.venv-docs/bin/python docs/config_page.py
	rm -rf build/pages build/site
	mkdir -p build/pages
	git ls-files -z | tar --null -T - -cf - | tar -xf - -C build/pages
	ln -sfn ../kernels build/annulus
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

venv:
	@tools/make_venv.sh .venv requirements.txt $(ACCELERATOR:%=requirements/%.txt)

venv-dev:
	@tools/make_venv.sh .venv requirements.txt requirements/dev.txt

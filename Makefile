# Every target makes its own set-up: .venv, through install.sh, which does nothing where nothing changed.
#   make demo                    trains the embedded job on this machine
#   make test                    the tests; ARGS="tests/learner -k head" for some of them
#   make check                   linters, types, layers
#   make bench                   step time over its floor, memory
#   make long [ONLY=2.1]         the long lines (issue.line) that docs/measured.md records
SHELL := bash
bin := .venv/bin
scripts := install.sh .ci/run

.PHONY: install demo test check bench long

install:
	@./install.sh

demo: install
	$(bin)/limen train $(ARGS)

# What needs a Ray cluster or an engine runs by itself: two at once would stand in each other's way on two cores.
alone := cluster or engine

test: install
ifdef ARGS
	$(bin)/python -m pytest $(ARGS)
else
	$(bin)/python -m pytest -n 2 --dist loadfile -m 'not ($(alone))'
	$(bin)/python -m pytest -m '$(alone)'
endif

check: install
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports --no-logo
	$(bin)/shellcheck $(scripts)
	if [ -x $(bin)/hadolint ]; then $(bin)/hadolint docker/Dockerfile.cpu docker/Dockerfile.gpu; fi

bench: install
	$(bin)/python benchmarks/run.py $(ARGS)

long: install
	$(bin)/python -m pytest tests/long -s $(if $(ONLY),-m 'line(id="$(ONLY)")') $(ARGS)

# Shortcuts for the commands in CONTRIBUTING.md. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help install test quick lint docs ci

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

install:  ## Install the package with what tests, lint and docs need
	pip install -e ".[test,dev,docs]"

test:  ## Run the whole test suite
	pytest

quick:  ## Run the tests that need less than about 20 seconds each
	pytest -m "not slow"

lint:  ## Check style, formatting, types and the Dockerfile
	ruff check .
	ruff format --check .
	mypy
	hadolint Dockerfile

docs:  ## Build the documentation into site/, with broken links as errors
	mkdocs build --strict

ci:  ## Do what CI does, in a fresh virtual environment
	.ci/run

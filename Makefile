# Everything runs in virtual environments that these targets make themselves; nothing outside the checkout is changed.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup demo serve test lint bench compare image test-image clean
BIN := .venv/bin
# Through the environment, so that no shell reads a file name as a command.
export IMAGE

# $(call environment,KIND): finds a Python and makes the environment ready; does nothing where it already is.
environment = python=$$(scripts/find-python) && "$$python" scripts/environment.py $(1)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' Makefile | expand -t 20

setup:  ## set up .venv (serving, client) and .venv-export (PyTorch's CPU build, for prepare)
	@$(call environment,serve)
	@$(call environment,export)

demo: setup  ## classify the sample photos (or IMAGE=path) on a real Triton, then stop
	@$(BIN)/python -m triton_vision.cli.demo -- $${IMAGE:+"$$IMAGE"}

serve: setup  ## make what is missing and serve model_repository on ports 8000 to 8002
	@$(BIN)/triton-vision prepare || test $$? -eq 1
	@exec $(BIN)/triton-vision serve

test: setup  ## run the whole test suite
	@$(call environment,dev)
	@.venv-export/bin/python -m pytest -q --confcutdir=tests/export tests/export
	@$(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile -m "not quiet" tests --ignore=tests/export
	@$(BIN)/python -m pytest -q -m quiet tests --ignore=tests/export

lint:  ## ruff, mypy strict
	@$(call environment,dev)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/hadolint Dockerfile.triton
	@$(BIN)/shellcheck deploy/deploy-triton.sh deploy/lib/*.sh

bench: setup  ## measure the served rate and latency of ensemble_lite
	@$(BIN)/triton-vision prepare efficientnet_lite0
	@$(BIN)/python -m triton_vision.cli.demo --bench

compare: setup  ## measure the suite beside plain loops, FastAPI, LitServe and a tutorial-style Triton
	@$(call environment,bench)
	@$(BIN)/python benchmarks/run.py

image:  ## build the container image from Dockerfile.triton (TAG=name, OPTIONS="--build-arg WEIGHTS=random")
	@scripts/image/build "$${TAG:-triton-vision}" $$OPTIONS

test-image: setup  ## build the image on a base made here, run it in a Docker engine of its own (as root)
	@$(call environment,dev)
	@$(BIN)/python -m pytest -q tests/image
	@$(BIN)/python -m pytest -q tests/deploy/engine

clean:  ## remove the environments and the artifacts
	@rm -rf .venv .venv-export .venv-bench .setup.lock build/benchmark build/image
	@rm -f model_repository/*/*/model.onnx* model_repository/*/*/model.pt* model_repository/*/*/model.plan*

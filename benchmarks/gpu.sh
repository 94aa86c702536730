#!/usr/bin/env bash
# PPO steps on a CUDA GPU, compared with TRL's and with memory limits, in under ten minutes: bash benchmarks/gpu.sh
#   WHEELS=FOLDER  take missing packages from wheels there, not from the package index
#   PYTHON=PYTHON  interpreter; torch must be there already
# `bash benchmarks/gpu.sh --help` lists all options.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"

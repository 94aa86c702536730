#!/usr/bin/env bash
# What a CUDA GPU does, in calls of at most ten minutes: bash benchmarks/speed/gpu.sh --parts steps
#   WHEELS=FOLDER  take missing packages from wheels there, not from the package index
#   PYTHON=PYTHON  interpreter; torch must be there already
# `bash benchmarks/speed/gpu.sh --help` lists all options.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" benchmarks/speed/gpu.py "$@"

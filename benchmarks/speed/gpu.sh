#!/usr/bin/env bash
# What a CUDA GPU does, in calls of at most ten minutes, each of which goes on where the last ended:
#   bash benchmarks/speed/gpu.sh
#   WHEELS=FOLDER  take missing packages from wheels there (kit.sh), not from the package index
#   PYTHON=PYTHON  interpreter; torch must be there already
# `bash benchmarks/speed/gpu.sh --help` lists all options.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" benchmarks/speed/gpu.py "$@"

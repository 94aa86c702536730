#!/usr/bin/env bash
# Collect the wheels that a GPU machine without a package index needs:
#   bash benchmarks/speed/kit.sh --python 3.12 --have freeze.txt   # `pip freeze` of that machine
#   PYTHON=PYTHON  interpreter whose pip downloads them
# `bash benchmarks/speed/kit.sh --help` lists all options.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" benchmarks/speed/kit.py "$@"

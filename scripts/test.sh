#!/usr/bin/env bash
# Runs every test that this machine can run. Arguments go to pytest.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/test_sample.py -k round_trip
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=.
source scripts/venv.sh

"$python" -c '
import torch
if torch.cuda.is_available():
    print("GPU tests: run, on", torch.cuda.get_device_name())
else:
    print("GPU tests: skipped, as torch sees no CUDA GPU (each is listed below with its reason)")
'
exec "$python" -m pytest -ra "$@"

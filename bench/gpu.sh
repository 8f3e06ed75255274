#!/usr/bin/env bash
# Checks and times every kernel, CUDA graphs and the engine on a GPU, in minutes. Needs torch,
# transformers and numpy; nothing is installed. Rows are appended to bench/results/device.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; assert torch.cuda.is_available(), "no GPU is visible to torch"'
timeout 330 python3 -m bench.device --device cuda --full

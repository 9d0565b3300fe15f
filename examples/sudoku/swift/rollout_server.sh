#!/usr/bin/env bash
# Server mode, first half: the rollout server plays Sudoku, on GPUs of its own. The second half is server.sh. Run it in the
# root of the checkout, with an environment server started:
#   python server_scripts/start_sudoku_server.py --max-concurrent-envs 64
# The scheduler is named here and not in server.sh: it runs where the turns are sampled.
set -euo pipefail
cd "$(dirname "$0")/../../.."

swift rollout \
  --model "${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
  --external_plugins examples/sudoku/swift_plugin.py \
  --multi_turn_scheduler sudoku_scheduler \
  --use_gym_env true \
  --max_turns 20 \
  --vllm_max_model_len 8192 \
  --host 127.0.0.1 \
  --port "${PORT:-8001}" \
  "$@"

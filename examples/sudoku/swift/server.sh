#!/usr/bin/env bash
# Server mode, second half: the trainer, once rollout_server.sh says that it runs. --vllm_server_pass_dataset hands the
# rows' env_config to the rollout server; without it no game can start.
set -euo pipefail
cd "$(dirname "$0")/../../.."

swift rlhf \
  --rlhf_type grpo \
  --model "${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
  --dataset examples/sudoku/sudoku.jsonl \
  --use_gym_env true \
  --use_vllm true \
  --vllm_mode server \
  --vllm_server_host 127.0.0.1 \
  --vllm_server_port "${PORT:-8001}" \
  --vllm_server_pass_dataset true \
  --max_completion_length 64 \
  --num_generations 8 \
  --per_device_train_batch_size 8 \
  --temperature 1.0 \
  --learning_rate 1e-6 \
  --beta 0.0 \
  --num_train_epochs 1 \
  --logging_steps 1 \
  --log_completions true \
  --output_dir outputs/swift \
  "$@"

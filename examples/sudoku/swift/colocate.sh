#!/usr/bin/env bash
# GRPO on Sudoku with ms-swift, vLLM on the trainer's own GPUs. Run it in the root of the checkout, with a server started:
#   python server_scripts/start_sudoku_server.py --max-concurrent-envs 64
# Further options go to swift rlhf:
#   bash examples/sudoku/swift/colocate.sh --learning_rate 5e-7
set -euo pipefail
cd "$(dirname "$0")/../../.."

swift rlhf \
  --rlhf_type grpo \
  --model "${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
  --dataset examples/sudoku/sudoku.jsonl \
  --external_plugins examples/sudoku/swift_plugin.py \
  --multi_turn_scheduler sudoku_scheduler \
  --use_gym_env true \
  --max_turns 20 \
  --use_vllm true \
  --vllm_mode colocate \
  --vllm_gpu_memory_utilization 0.5 \
  --vllm_max_model_len 8192 \
  --sleep_level 1 \
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

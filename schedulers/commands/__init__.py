"""The commands of ``openenv-rollout``; they need the extra ``cli``."""

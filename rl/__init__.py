"""Train on rewards: rollouts in groups, verdicts, advantages, one update of both heads."""

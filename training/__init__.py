"""Training of Cedar's small model: seeded tasks, a differentiable twin of the network, export, evaluation."""

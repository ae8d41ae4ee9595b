"""Substrates place the roles of a plan and keep them alive; none of them knows reinforcement learning."""

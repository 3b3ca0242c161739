"""Judging images: verdicts, GenEval's rules, verifiers. Never imported by the agent."""

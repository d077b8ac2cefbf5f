"""Interpreters: functions from trace to trace, and `evaluate`, from trace to values."""

"""Structured ops: equations that own bodies, each with all its rules in one place."""

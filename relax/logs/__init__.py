"""Structured logs: one JSON object a line, written by every service and merged by relax-logs."""

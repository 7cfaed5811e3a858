"""Schedules: tasks that run at the times of a cron expression or of an interval."""

"""Failed messages: filters, groups of equal failures, and what is done with all that match a filter.

The command line, dashboards and apps share them.
"""

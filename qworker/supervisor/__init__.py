"""Worker processes: one in this process (`single`), or several under a supervisor (`supervisor`)."""

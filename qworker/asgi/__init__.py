"""One HTTP server for `qworker serve`, the health port and jsonrpcd: uvicorn, with limits and checks of its own."""

"""One HTTP server for `qworker serve` and for the health port: uvicorn, with limits that uvicorn does not have."""

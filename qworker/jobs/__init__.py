"""The job handle: the result, the status, the progress and the cancellation of an enqueued call.

A worker keeps what a caller can ask for in cells of the job's queue: `results/<id>`, `progress/<id>` and
`cancels/<id>`. So any process that can reach the store can ask, and no process has to stay.
"""

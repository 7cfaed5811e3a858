"""Each row of the README's feature table has a page, and tests that prove it: on memory, file and redis alike."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Its tests run on every backend.
CONTRACT = "qworker/testing/contract_"
STORES = {"memory", "file", "redis"}

# By feature: the tests that prove it on each of the three stores.
ON_EVERY_STORE = {
    "Retry policies": "tests/unit/test_features.py::test_the_class_of_an_error_decides_whether_its_message_runs_again",
    "Unlimited tries": "tests/unit/test_features.py::test_an_unlimited_task_runs_until_it_succeeds",
    "Retry without a try": (
        "tests/unit/test_retry_policies.py::test_a_retry_that_does_not_count_leaves_the_tries_and_is_logged"
    ),
    "Typed values": "tests/unit/test_features.py::test_typed_values_arrive_as_they_were_sent_and_others_are_refused",
    "Checks at enqueue": (
        "tests/unit/test_features.py::test_typed_values_arrive_as_they_were_sent_and_others_are_refused"
    ),
    "Options per call": "tests/unit/test_call_options.py::test_options_of_a_call_count_instead_of_those_of_the_task",
    "Delays": "qworker/testing/contract_publish.py::test_a_delayed_message_is_not_leased_before_it_is_due",
    "One message for each id": (
        "qworker/testing/contract_publish.py::test_a_held_id_stays_taken_after_its_message_is_gone"
    ),
    "One call at a time": "qworker/testing/contract_unique.py::test_keep_stores_nothing_while_one_waits_or_is_leased",
    "Unique across queues": "qworker/testing/contract_unique.py::test_a_key_of_the_app_counts_in_all_queues",
    "Replace and debounce": "qworker/testing/contract_unique.py::test_debounce_is_due_after_the_last_one",
    "Blocks of calls": "tests/unit/test_buffered.py::test_calls_are_sent_in_few_batches_when_the_block_ends",
    "Results": ("tests/unit/test_jobs.py::test_a_job_gives_what_its_handler_returned_in_the_type_of_its_annotation"),
    "Status and lists of jobs": "tests/unit/test_jobs.py::test_jobs_are_listed_by_state_task_and_queue",
    "Progress": "tests/unit/test_jobs.py::test_progress_is_followed_to_the_end_of_the_job",
    "Cancel": "tests/unit/test_job_cancel.py::test_a_running_handler_is_stopped_within_a_moment",
    "Schedules": "tests/unit/test_features.py::test_a_schedule_ticks_without_another_process",
    "Time limits": "tests/unit/test_features.py::test_plain_functions_run_in_threads_and_a_late_one_has_timed_out",
    "Threads and processes": (
        "tests/unit/test_features.py::test_plain_functions_run_in_threads_and_a_late_one_has_timed_out"
    ),
    "Priorities": "qworker/testing/contract_publish.py::test_a_higher_priority_is_leased_first_and_each_in_order",
    "Weights and strict order of queues": (
        "tests/unit/test_features.py::test_weights_a_strict_order_and_a_limit_share_a_worker_among_queues"
    ),
    "Concurrency for each queue": (
        "tests/unit/test_features.py::test_a_limit_of_a_queue_leaves_the_other_consumers_free"
    ),
    "Hooks": "tests/unit/test_features.py::test_hooks_run_around_handlers_whose_parameters_are_injected",
    "Injection": "tests/unit/test_features.py::test_hooks_run_around_handlers_whose_parameters_are_injected",
    "Tasks for failures": "tests/unit/test_features.py::test_a_failure_is_reported_to_its_task",
    "Calls by name": (
        "tests/unit/test_features.py::test_a_call_by_name_and_an_included_task_run_in_the_worker_of_the_app"
    ),
    "Rolling deploys": (
        "tests/unit/test_features.py::test_a_call_of_another_version_stays_for_the_workers_of_that_version"
    ),
    "Clean shutdown": "qworker/testing/contract_settle.py::test_a_release_leaves_tries_unchanged",
    "Pause": "qworker/testing/contract_admin.py::test_a_paused_queue_gives_nothing_to_any_worker_until_it_is_resumed",
    "Groups of failures": "tests/unit/test_failures.py::test_groups_count_the_failures_of_a_queue",
    "Requeue": "qworker/testing/contract_admin.py::test_requeue_makes_failed_messages_ready_with_no_tries",
    "History": "qworker/testing/contract_history.py::test_every_transition_is_told_by_the_history_in_order",
    "Explain": "tests/unit/test_features.py::test_what_is_not_running_is_explained",
    "Move": "tests/unit/test_features.py::test_messages_move_to_another_store_with_their_ids",
    "Keep done messages": (
        "qworker/testing/contract_retention.py::test_acked_messages_are_kept_as_done_where_the_url_says_so"
    ),
}
# Features in which the kind of the store plays no part, or which are about other stores.
ELSEWHERE = {
    "Calls after a commit": (
        "tests/unit/test_sqlalchemy.py::test_a_commit_sends_its_calls_as_one_batch_and_a_rollback_drops_them"
    ),
    "Dashboard": "tests/unit/test_ui.py::test_every_page_and_link_works_below_any_path",
    "Monitoring": "tests/unit/test_health.py::test_prometheus_own_parser_reads_the_page",
    "Tests in memory": "tests/unit/test_testing_helpers.py::test_the_first_failure_is_raised_once_nothing_is_left",
    "Django, Flask, FastAPI": (
        "tests/e2e/test_services.py::test_a_fastapi_service_starts_shows_and_cancels_jobs_and_drains"
    ),
    "Pods": "tests/e2e/test_pods.py::test_a_rolling_restart_under_load_loses_nothing_and_repeats_nothing",
    "systemd": (
        "tests/unit/test_docs.py::test_the_systemd_unit_runs_a_command_that_there_is_drains_and_shares_its_queue"
    ),
    "Queues over HTTP": "tests/unit/test_mq_server.py::test_a_message_makes_the_round_on_any_backend",
    "Five protocols": "tests/unit/test_move_pairs.py::test_a_message_survives_the_move_between_any_two",
    "Spark": "tests/spark/test_load.py::test_each_row_runs_once_in_a_worker_with_the_columns_of_its_parameters",
}
PROOFS = ON_EVERY_STORE | ELSEWHERE


def section() -> str:
    return (ROOT / "README.md").read_text().split("\n## Features\n")[1].split("\n## ")[0]


def features() -> dict[str, str]:
    """The features in the table, with their pages."""
    return dict(re.findall(r"^\| \[([^\]]+)\]\(([^)#]+)(?:#[^)]*)?\) \|", section(), re.MULTILINE))


def functions(file: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods of a module, and the fixtures that it imports from other modules of tests."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.unit.test_"):
            there = functions(ROOT / f"{node.module}.py".replace(".", "/", 2))
            found |= {name.name: there[name.name] for name in node.names if name.name in there}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
    return found


def stores(name: str, known: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> Iterator[str]:
    """The texts in the parameters of a test or fixture, and in those of the fixtures that it takes."""
    for decorator in known[name].decorator_list:
        yield from (str(node.value) for node in ast.walk(decorator) if isinstance(node, ast.Constant))
    for argument in known[name].args.args:
        if argument.arg in known:
            yield from stores(argument.arg, known)


def test_every_row_has_a_proof() -> None:
    rows = [line for line in section().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(features())
    assert features().keys() == PROOFS.keys()


@pytest.mark.parametrize("feature", PROOFS)
def test_the_proof_of_a_row_exists(feature: str) -> None:
    file, _, test = PROOFS[feature].partition("::")
    known = functions(ROOT / file)
    assert test in known
    assert feature in ELSEWHERE or file.startswith(CONTRACT) or set(stores(test, known)) >= STORES
    assert (ROOT / features()[feature]).is_file()

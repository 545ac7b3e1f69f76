"""The table of scenarios: the scenarios of each kind of server, with reasons.

Every scenario runs once on the server that trusts its clients, and compares values. Another kind of server
runs only the scenarios whose outcome can differ there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.clients.harness import scenarios


def _of_headers(generation: str) -> list[str]:
    """Return the scenarios for a generation of the header wire, without the other generation's own."""
    other = {"0.6": "scenario_07_", "0.7": "scenario_06_"}[generation]
    return [name for name in scenarios("scenarios_headers") if not name.startswith(other)]


EVERY = [
    *(("0.8", name) for name in scenarios("scenarios_08")),
    *(("0.7", name) for name in _of_headers("0.7")),
    *(("0.6", name) for name in _of_headers("0.6")),
]
"""Each client generation with each of its scenarios."""

REFUSED = {
    "scenario_an_adapter_is_applied_to_its_request_alone": "takes adapters from the Hub alone",
    "scenario_an_adapter_that_does_not_exist": "there is no public repository of that name",
    "scenario_a_segfault_costs_one_request": "module 'ctypes' is not available on this server",
    "scenario_a_process_that_ends_itself_costs_one_request": (
        "module 'os' is not available on this server"
    ),
    "scenario_what_cannot_be_sent_is_said": "module 'threading' is not available on this server",
    "scenario_what_the_user_sees": "module 'sys' is not available on this server",
}
"""Scenarios that the server refuses to untrusted users, with a part of the message."""

Reasons = Mapping[str, tuple[str, ...]]

_READS = "reads_of_layers_and_logits"
_OF_THE_SCRIPT = (
    "a_class_of_the_script_that_calls_super",
    "classes_that_use_super",
    "functions_travel_by_value",
    "named_tuples_of_the_script",
    "a_users_module_travels",
    "a_users_object_comes_back_as_its_own_class",
    "a_users_object_travels_both_ways",
)
_ERRORS = (
    "an_error_names_the_users_line",
    "an_error_of_torchs",
    "an_error_in_the_model_names_the_users_lines",
    "an_error_in_a_users_function",
    "an_error_in_a_session",
)
_HYBRID = (
    "hybrid_session",
    "hybrid_trace",
    "hybrid_with_large_values",
    "hybrid_whose_local_part_fails",
)
_EXITS = ("a_block_that_exits", "a_session_that_exits")
_RESULTS = (
    "a_large_result_is_fetched",
    "a_small_result_comes_at_once",
    "without_compression",
    "nothing_is_saved",
)

SANDBOXED: Reasons = {
    "the plainest": (_READS,),
    "the policy guards each name, attribute and import of a block": (
        "plain_python_in_a_block",
        *_OF_THE_SCRIPT,
        "a_function_that_torch_decorates",
        "names_that_are_not_used",
        "source_of_a_forward",
        "source_named_within_its_forward",
        "module_called_ad_hoc",
        "attention_weights_need_eager",
    ),
    "a block gets copies of weights, and may write to its own": (
        "in_place_edit",
        "gradients",
        "weights_keep_no_gradient",
        "edit_that_lasts",
        "edit_in_a_session",
    ),
    "threads and loops of nnsight run within limits": (
        "several_invokes",
        "barrier",
        "generate_with_iteration",
        "generate_iter",
        "06_generate_next",
        "session_of_traces",
        "loop_in_a_session",
        "a_function_with_a_trace_in_a_session",
        "cache",
        "07_cache",
    ),
    "errors come from a confined process, which hides the server's own paths": (
        *_ERRORS,
        "an_error_in_a_loop_over_tokens",
        "an_error_in_a_gradient",
        "an_error_in_a_method",
    ),
    "a process that ends is another's than the server's": _EXITS,
    "results leave the process by a pipe with limits": (
        *_RESULTS,
        "a_view_is_not_sent_with_its_storage",
        "statuses_in_order",
        "what_a_block_puts_into_a_list_comes_back",
    ),
    "values go to the client and back while the block waits": _HYBRID,
    "it is refused": tuple(name.removeprefix("scenario_") for name in REFUSED),
}

PER_USER: Reasons = {
    "the plainest": (_READS,),
    "a reset takes back what a block changed": (
        "in_place_edit",
        "gradients",
        "weights_keep_no_gradient",
        "edit_that_lasts",
        "edit_in_a_session",
        "attention_weights_need_eager",
        "cache",
        "07_cache",
        "source_of_a_forward",
        "source_named_within_its_forward",
    ),
    "a reset forgets what a block defined": (
        *_OF_THE_SCRIPT,
        "an_edited_script_is_not_confused_with_the_last",
    ),
    "the process goes on after an error": _ERRORS,
    "the process is another one afterwards": _EXITS,
    "state of one request must not reach the next": (
        "generate_with_iteration",
        "generate_iter",
        "barrier",
        "several_invokes",
        "session_of_traces",
        "statuses_in_order",
        "nothing_is_saved",
        "a_loop_that_outruns_the_model_is_told_each_time",
        "what_a_block_puts_into_a_list_comes_back",
        *_HYBRID,
    ),
}

STACK: Reasons = {
    "the plainest": (_READS, "session_of_traces"),
    "each update passes through Redis": (
        "statuses_in_order",
        "an_error_names_the_users_line",
        "an_error_in_a_session",
        *_EXITS,
        *_HYBRID,
    ),
    "results lie on S3": (*_RESULTS, "a_large_result_of_an_asynchronous_session"),
    "another gateway may answer a poll": (
        "non_blocking",
        "non_blocking_session",
        "non_blocking_error",
        "poll_of_an_unknown_job",
        "asynchronous",
        "asynchronous_error",
    ),
    "the leader delivers webhooks": (
        "callback",
        "callback_at_every_status",
        "callback_by_a_signed_post",
        "callback_with_a_query_of_its_own",
        "a_callback_that_fails_harms_nobody",
    ),
    "what is served is known to another process": (
        "status_and_comparison",
        "status",
        "comparison",
        "a_module_the_server_lacks",
        "a_model_the_server_lacks",
        "a_version_the_server_lacks",
        "the_class_of_a_model",
        "the_address_of_the_server",
    ),
    "it is refused on a node": ("a_process_that_ends_itself_costs_one_request",),
}

SHARED_PASSES: Reasons = {
    "it takes part in a pass of several": (
        _READS,
        "in_place_edit",
        "replaced_output",
        "early_stop",
        "plain_python_in_a_block",
        "functions_travel_by_value",
        "cache",
    ),
    "it must run alone, which the others must not notice": (
        "skip_a_module",
        "source_of_a_forward",
        "several_invokes",
        "barrier",
        "generate_with_iteration",
        "session_of_traces",
        "gradients",
        "weights_keep_no_gradient",
        "edit_that_lasts",
        "attention_weights_need_eager",
        "an_adapter_is_applied_to_its_request_alone",
    ),
    "one of several fails": (
        "an_error_names_the_users_line",
        "an_error_in_the_model_names_the_users_lines",
        "a_block_that_exits",
        "a_segfault_costs_one_request",
    ),
    "each gets its own answer": ("statuses_in_order", "nothing_is_saved", "non_blocking"),
}


def chosen(reasons: Reasons, *generations: str) -> list[tuple[str, str]]:
    """Return the scenarios for a kind of server, and for clients of these generations."""
    names = {f"scenario_{name}" for named in reasons.values() for name in named}
    return [scenario for scenario in EVERY if scenario[0] in generations and scenario[1] in names]

"""The table of attacks: the aim of each, the defences that must stop it alone, and how it is observed.

Defences are tested one at a time: with the Protector off, the kernel must stop the attack, and with the
kernel's confinement off, the Protector must. `none` is a server that trusts its user; an attack that fails
there proves nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from types import ModuleType
from typing import Any

from tests.sandbox.attacks import (
    bombs,
    compiled,
    escapes,
    files,
    frames,
    inheritance,
    leakage,
    libraries,
    network,
    pickles,
    processes,
    tampering,
    watch,
)

FAMILIES = [
    f"tests.sandbox.attacks.{name}"
    for name in (
        "plain",
        "files",
        "network",
        "processes",
        "bombs",
        "escapes",
        "inheritance",
        "compiled",
        "libraries",
        "tampering",
        "leakage",
        "frames",
    )
]


class Defence(Flag):
    """The defences that can stop an attack."""

    KERNEL = auto()
    """Landlock, seccomp, rlimits, an empty environment, no descriptors."""
    PROTECTOR = auto()
    """The language policy: imports, attributes, builtins, and the globals of a payload."""
    LIMIT = auto()
    """The host's clock, and its counts of the frames that a runner sends."""
    FRAMES = auto()
    """The host's checks of frames, which also apply to trusted runners: `none` stops these attacks too."""
    FRESH = auto()
    """One process for each request."""


KERNEL, PROTECTOR, LIMIT, FRAMES, FRESH = Defence
BOTH = KERNEL | PROTECTOR

TIME = "NDIF_EXECUTION_TIMEOUT_SECONDS"
MEMORY = "NDIF_RUNNER_MEMORY_BYTES"
THREADS = "NDIF_RUNNER_MAX_THREADS"
RESULT = "NDIF_MAX_RESULT_BYTES"
LOG = "NDIF_MAX_LOG_BYTES"
LINES = "NDIF_MAX_LOG_LINES_PER_S"
STREAM = "NDIF_MAX_STREAMED_BYTES"
REQUEST = "NDIF_MAX_REQUEST_BYTES"
PROTOCOL = "broke its protocol|what it may not|over the limit"


@dataclass(frozen=True)
class Attack:
    """One row."""

    function: Callable[..., Any]
    """A block's body, or a function that makes a payload; its docstring says how it attacks."""
    aim: str
    stopped_by: Defence
    """Each of these must stop it alone."""
    watch: Callable[[Any], watch.Watch]
    """Makes the observer of the aim."""
    expected_error: str = ""
    """A pattern of the error, if a limit or the checks of frames stop the attack."""
    is_tamed: bool = False
    """True if the Protector lets the call run, but keeps the library from doing the attack's aim."""

    @property
    def name(self) -> str:
        """Return family and function."""
        return f"{self.family}.{self.function.__name__}"

    @property
    def family(self) -> str:
        """Return the name of the attack's module."""
        return self.function.__module__.rpartition(".")[2]

    @property
    def how(self) -> str:
        """Return the method of the attack in a few words."""
        return (self.function.__doc__ or "").strip().splitlines()[0]

    @property
    def is_payload(self) -> bool:
        """Return True if the attack is a whole payload, not a block."""
        return self.function.__annotations__.get("return") == "bytes"

    @property
    def forms(self) -> tuple[str, ...]:
        """Return the forms of the attack: a block, or a function that travels with one."""
        if self.is_payload:
            return ("payload",)
        return ("block", "call") if self.family == "escapes" else ("block",)


def _rows(
    aim: str,
    stopped_by: Defence,
    watch: Callable[[Any], watch.Watch],
    *functions: Callable[..., Any],
    expected_error: str = "",
    is_tamed: bool = False,
) -> list[Attack]:
    """Return rows that differ only in their method."""
    rest = (aim, stopped_by, watch, expected_error, is_tamed)
    return [Attack(function, *rest) for function in functions]


def _with(family: ModuleType, target: str) -> list[Callable[..., Any]]:
    """Return the functions of a family that take a target."""
    return [
        function
        for function in vars(family).values()
        if target in getattr(function, "__annotations__", {})
    ]


ATTACKS: list[Attack] = [
    # --- files ---------------------------------------------------------------------------------------
    *_rows(
        *("read a file", BOTH, watch.SecretStays),
        files.reads_with_open,
        files.reads_with_os_open,
        files.reads_with_io,
        files.reads_with_open_code,
        files.reads_with_codecs,
        files.reads_with_pathlib,
        files.reads_with_linecache,
        files.reads_with_a_loader,
        files.reads_with_mmap,
        files.reads_with_system_calls,
        files.reads_with_openat2,
        files.reads_with_io_uring,
        files.reads_with_sendfile,
        files.reads_by_a_symlink,
        files.reads_by_a_hard_link,
        files.reads_by_own_root,
        files.reads_by_anothers_root,
        files.reads_in_a_thread,
        files.reads_with_torch_from_file,
        files.reads_with_a_torch_storage,
        files.reads_with_numpy_fromfile,
        files.reads_with_numpy_memmap,
        files.reads_with_numpy_loadtxt,
        files.reads_with_numpy_genfromtxt,
        files.reads_with_numpy_datasource,
    ),
    *_rows("read a file by its handle", BOTH, watch.SecretStays, files.reads_by_handle),
    *_rows(
        *("read a folder's names", BOTH, watch.SecretStays),
        files.reads_names,
        files.reads_names_with_glob,
    ),
    *_rows(
        *("read a file of tensors", BOTH, watch.TensorStays),
        files.reads_with_torch_load,
        files.reads_with_torch_load_mmap,
        files.reads_with_torch_file_reader,
        files.reads_with_numpy_load,
    ),
    *_rows("read the passwords", BOTH, watch.SystemFileStays, files.reads_a_systems_file),
    *_rows("read the server's token", BOTH, watch.TokenStays, files.reads_the_token),
    *_rows("read another model", BOTH, watch.OtherModelStays, files.reads_another_model),
    *_rows("read another's result", BOTH, watch.ResultStays, files.reads_a_result),
    *_rows(
        *("read the server's environment", BOTH, watch.EnvironmentStays),
        files.reads_os_environ,
        files.reads_getenv_of_libc,
        files.reads_own_environment,
        files.reads_environment_on_the_stack,
        files.reads_zygotes_environment,
        files.reads_servers_environment,
        files.reads_servers_memory,
        files.reads_servers_memory_by_call,
    ),
    *_rows(
        *("open a device or what stands for one", BOTH, watch.NotServed),
        files.opens_a_disk,
        files.opens_a_terminal,
        files.opens_own_memory,
    ),
    *_rows(
        *("see what happens to files", BOTH, watch.NotServed),
        files.watches_a_folder,
        files.watches_a_file_system,
    ),
    *_rows(
        *("write, change or remove a file", BOTH, watch.FilesStay),
        files.writes_with_open,
        files.appends_with_open,
        files.writes_with_pathlib,
        files.writes_with_tempfile,
        files.writes_a_nameless_file,
        files.truncates,
        files.removes,
        files.removes_a_folder,
        files.removes_a_tree,
        files.renames,
        files.makes_a_folder,
        files.makes_a_symlink,
        files.makes_a_hard_link,
        files.makes_a_pipe,
        files.makes_a_device,
        files.makes_a_socket,
        files.changes_the_mode,
        files.changes_the_mode_by_number,
        files.changes_the_owner,
        files.changes_the_times,
        files.changes_an_attribute,
        files.changes_through_a_path_descriptor,
        files.writes_with_torch_save,
        files.writes_with_torch_from_file,
        files.writes_with_torch_storage,
        files.writes_with_the_profiler,
        files.writes_with_numpy_save,
        files.writes_with_numpy_savetxt,
        files.writes_with_tofile,
        files.writes_with_dump,
        files.writes_with_numpy_memmap,
        files.writes_with_the_model,
        files.writes_with_the_tokenizer,
        files.writes_with_the_configuration,
        files.writes_with_a_read_only_descriptor,
    ),
    *_rows(
        *("change the model's files", BOTH, watch.ModelFilesStay),
        files.writes_beside_the_model,
        files.touches_beside_the_model,
    ),
    *_rows("write shared memory", BOTH, watch.SharedMemoryStays, files.writes_to_shared_memory),
    *_rows("forge the server's log", BOTH, watch.LogStays, files.writes_to_the_servers_log),
    # --- network -------------------------------------------------------------------------------------
    *_rows(
        *("reach another process by a socket", BOTH, watch.Silence),
        network.connects,
        network.connects_by_v6,
        network.connects_by_number,
        network.connects_with_data,
        network.connects_by_multipath,
        network.sends_a_datagram,
        network.sends_a_datagram_by_v6,
        network.connects_to_a_path,
        network.sends_to_a_path,
        network.connects_to_an_abstract_name,
        network.sends_to_an_abstract_name,
        network.sends_from_a_pair,
        network.passes_a_descriptor,
        network.fetches_with_urllib,
        network.fetches_with_httpx,
        network.fetches_with_torch_hub,
        network.fetches_with_numpy,
        network.joins_with_torch_distributed,
        network.resolves_a_name,
    ),
    *_rows("call the server", BOTH, watch.ServerNotCalled, network.calls_the_server),
    *_rows(
        *("have a socket", BOTH, watch.NotServed),
        network.listens,
        network.opens_netlink,
        network.opens_a_raw_socket,
        network.opens_a_packet_socket,
        network.opens_every_family,
    ),
    # --- processes -----------------------------------------------------------------------------------
    *_rows(
        *("start a process", BOTH, watch.NoProcess),
        processes.forks_with_a_data_loader,
        processes.forks_with_a_changed_data_loader,
        processes.forks_below_a_data_loader,
        libraries.starts_scipys_workers,
        libraries.starts_scikits_workers,
        is_tamed=True,
    ),
    *_rows(
        *("start a process", BOTH, watch.NoProcess),
        processes.forks,
        processes.forks_a_terminal,
        processes.forks_by_number,
        processes.clones,
        processes.clones_anew,
        processes.becomes_a_daemon,
        processes.forks_with_multiprocessing,
        processes.forks_with_torch,
        processes.forks_with_a_data_loaders_context,
        processes.runs_a_program,
        processes.runs_a_shell,
        processes.runs_a_pipe,
        processes.spawns,
        processes.becomes_a_program,
        processes.becomes_a_program_by_number,
        processes.runs_from_memory,
    ),
    *_rows(
        *("harm another process", BOTH, watch.VictimUnharmed),
        processes.kills,
        processes.stops,
        processes.kills_a_group,
        processes.kills_by_number,
        processes.kills_a_thread,
        processes.queues_a_signal,
        processes.kills_by_descriptor,
        processes.kills_through_an_owner,
        processes.kills_through_its_memory_score,
        processes.traces,
        processes.seizes,
        processes.reads_memory,
        processes.writes_memory,
        processes.reads_memory_file,
        processes.writes_memory_file,
        processes.reads_environment,
        processes.changes_priority,
        processes.changes_affinity,
        processes.changes_schedule,
        processes.changes_schedule_by_number,
        processes.changes_io_priority,
        processes.changes_limits,
    ),
    *_rows(
        *("harm the server's processes", BOTH, watch.NotServed),
        processes.kills_everybody,
        processes.kills_the_zygote,
        processes.kills_the_server,
        processes.takes_a_descriptor,
        processes.opens_a_process,
        processes.compares_processes,
        processes.moves_memory,
        processes.outlives_its_parent,
        processes.changes_personality,
    ),
    *_rows(
        *("have privileges", BOTH, watch.NotServed),
        processes.makes_a_namespace,
        processes.clones_into_a_namespace,
        processes.enters_a_namespace,
        processes.mounts,
        processes.unmounts,
        processes.copies_a_mount,
        processes.changes_root,
        processes.becomes_another_user,
        processes.keeps_capabilities,
        processes.counts_capabilities,
        processes.gains_privileges,
        processes.keeps_keys,
    ),
    *_rows(
        *("attack the kernel or the machine", BOTH, watch.NotServed),
        processes.loads_into_the_kernel,
        processes.counts_events,
        processes.handles_page_faults,
        processes.makes_a_ring,
        processes.takes_the_machine,
        processes.renames_the_machine,
        processes.changes_the_time,
        processes.swaps,
        processes.reads_the_kernels_log,
    ),
    *_rows(
        *("reach others by the kernel's objects", BOTH, watch.KernelObjects),
        processes.reads_shared_memory,
        processes.sets_a_semaphore,
        processes.takes_a_message,
        processes.takes_a_posix_message,
        processes.reads_posix_shared_memory,
    ),
    # --- bombs ---------------------------------------------------------------------------------------
    *_rows(
        *("take all memory", KERNEL, watch.LimitHolds),
        bombs.fills_memory_with_tensors,
        bombs.fills_memory_with_one_tensor,
        bombs.fills_memory_with_bytes,
        bombs.fills_memory_with_text,
        expected_error=MEMORY,
    ),
    *_rows(
        *("take all memory past the limit", BOTH, watch.LimitHolds),
        bombs.fills_memory_with_mappings,
        bombs.drops_shared_memory,
        bombs.fills_memory_with_page_tables,
        bombs.fills_memory_that_grows_down,
        bombs.fills_memory_with_a_file,
        bombs.fills_memory_with_kernel_objects,
        bombs.fills_memory_with_pipes,
        bombs.takes_every_descriptor,
        bombs.raises_its_limits,
    ),
    *_rows("hold memory for ever", BOTH, watch.LimitHolds, bombs.locks_memory),
    *_rows(
        *("take all threads", KERNEL, watch.LimitHolds),
        bombs.starts_threads,
        bombs.starts_threads_of_torch,
        expected_error=THREADS,
    ),
    *_rows(
        *("run for ever", LIMIT, watch.LimitHolds),
        bombs.never_ends,
        bombs.sleeps,
        bombs.catches_everything,
        bombs.ignores_signals,
        bombs.blocks_in_c,
        bombs.waits_for_a_lock,
        bombs.multiplies_for_ever,
        bombs.searches_for_ever,
        bombs.ends_its_timer,
        bombs.raises_a_slow_error,
        expected_error=TIME,
    ),
    *_rows(
        *("crash the runner", FRAMES, watch.ServerUnharmed),
        bombs.crashes,
        expected_error=f"SIGSEGV|RecursionError|MemoryError|{MEMORY}|{TIME}",
    ),
    *_rows(
        *("return too much", LIMIT, watch.ResultHolds),
        bombs.returns_too_much,
        bombs.returns_too_much_text,
        expected_error=RESULT,
    ),
    *_rows(
        *("print too much", LIMIT, watch.LimitHolds),
        bombs.prints_too_much,
        bombs.prints_one_line_too_long,
        bombs.prints_without_a_newline,
        bombs.warns_too_much,
        expected_error=LOG,
    ),
    *_rows("print too fast", LIMIT, watch.LimitHolds, bombs.prints_too_fast, expected_error=LINES),
    *_rows(
        *("exhaust who reads the answer", FRAMES, watch.ServerUnharmed),
        bombs.recurses_within_limits,
        expected_error="RecursionError: maximum recursion depth exceeded",
    ),
    *_rows(
        *("exhaust who reads the answer", FRAMES, watch.ServerUnharmed),
        bombs.returns_depths,
        bombs.returns_endlessly,
        expected_error="its saved values could not be sent: .* excessively deep",
    ),
    *_rows(
        *("exhaust who reads the answer", FRAMES, watch.ServerUnharmed),
        bombs.raises_a_huge_error,
        expected_error="x{1000}",
    ),
    *_rows(
        *("exhaust who reads the answer", FRAMES, watch.ServerUnharmed),
        bombs.raises_a_chain,
        expected_error="ValueError: 29999$",
    ),
    *_rows(
        *("exhaust who reads the request", LIMIT, watch.PayloadUnread),
        bombs.unpacks_to_too_much,
        expected_error=REQUEST,
    ),
    *_rows(
        *("exhaust who reads the request", FRAMES, watch.ServerUnharmed),
        bombs.unpacks_to_more_than_it_says,
        expected_error="is not whole zstd data",
    ),
    *_rows(
        *("exhaust who reads the request", FRAMES, watch.ServerUnharmed),
        bombs.nests,
        expected_error="could not be read as an nnsight 0.8 trace",
    ),
    *_rows(
        *("exhaust who reads the request", LIMIT, watch.PayloadUnread),
        bombs.counts_to_the_end,
    ),
    *_rows(
        *("exhaust who reads the request", BOTH, watch.PayloadUnread),
        bombs.laughs,
        bombs.asks_for_all_memory,
    ),
    # --- escapes -------------------------------------------------------------------------------------
    *_rows(
        *("read a file by way of what is allowed", BOTH, watch.SecretStays),
        *(
            function
            for name, function in vars(escapes).items()
            if "secret_file" in getattr(function, "__annotations__", {})
            and name not in ("loads_a_library",)
            and not name.startswith("reads_memory")
        ),
    ),
    *_rows(
        *("reach memory by way of what is allowed", PROTECTOR, watch.NotServed),
        escapes.reads_memory_with_numpy,
        escapes.reads_memory_with_ctypes_of_numpy,
        escapes.reads_memory_with_strides,
    ),
    *_rows("load a library", BOTH, watch.NotServed, escapes.loads_a_library),
    *_rows(
        *("read the environment by formatting a text", BOTH, watch.EnvironmentStays),
        escapes.formats_globals,
        escapes.formats_with_a_map,
        escapes.formats_as_an_attribute,
        escapes.formats_with_formatter,
        escapes.formats_with_numpy,
    ),
    # --- inheritance ---------------------------------------------------------------------------------
    *_rows(
        *("write a file by what a class inherits", BOTH, watch.FilesStay),
        *_with(inheritance, "canary_folder"),
    ),
    *_rows(
        *("read the environment by what a class inherits", BOTH, watch.EnvironmentStays),
        inheritance.formats_with_super,
    ),
    *_rows(
        *("read a file by replacing a guard", BOTH, watch.SecretStays),
        inheritance.replaces_a_guard_with_an_enumeration,
    ),
    # --- compiled, loaded or fetched code ------------------------------------------------------------
    *_rows(
        *("read a file by what is compiled", BOTH, watch.SecretStays),
        compiled.loads_a_pickle_with_torch,
        compiled.evaluates_in_a_compiled_graph,
        compiled.evaluates_in_a_compiled_module,
        compiled.loads_source_with_inductor,
        compiled.finds_os_in_dynamo,
        compiled.reads_source_with_torch,
        compiled.finds_linecache_in_torch_library,
    ),
    *_rows(
        *("write a file by what is compiled", BOTH, watch.FilesStay),
        compiled.writes_with_torch_jit,
        compiled.writes_with_torch_package,
        compiled.writes_with_a_store,
        compiled.writes_with_torch_hub,
        compiled.writes_an_extension,
        compiled.writes_a_trace_of_the_compiler,
    ),
    *_rows("start a compiler", BOTH, watch.NoProcess, compiled.asks_a_compiler),
    # --- libraries -----------------------------------------------------------------------------------
    *_rows(
        *("read a file by a library's own ways", BOTH, watch.SecretStays),
        *_with(libraries, "secret_file"),
    ),
    *_rows(
        *("have a library load what is not the model's", BOTH, watch.LoadableSecretStays),
        libraries.generates_with_a_folder,
        libraries.loads_a_tokenizer,
    ),
    *_rows(
        *("write a file by a library's own ways", BOTH, watch.FilesStay),
        *_with(libraries, "canary_folder"),
    ),
    *_rows("start a process", BOTH, watch.NoProcess, libraries.runs_a_librarys_tests),
    *_rows(
        *("read the environment by formatting a text", BOTH, watch.EnvironmentStays),
        libraries.formats_a_users_string,
        libraries.formats_a_record,
        libraries.formats_a_bar,
        libraries.formats_with_a_printer,
    ),
    # --- payloads ------------------------------------------------------------------------------------
    *_rows(
        *("read a file before the block", BOTH, watch.SecretStays),
        *(
            function
            for function in vars(pickles).values()
            if list(getattr(function, "__annotations__", {})) == ["secret_file", "return"]
            and function.__annotations__["return"] == "bytes"
        ),
    ),
    *_rows(
        *("start a program before the block", BOTH, watch.FilesStay),
        pickles.calls_system,
        pickles.calls_posix_system,
        pickles.calls_popen,
        pickles.calls_pydoc,
        pickles.calls_a_library,
        pickles.makes_a_new_object,
    ),
    *_rows(
        *("change torch before the block", FRESH, watch.next_request(tampering.settings_of_torch)),
        pickles.changes_a_module,
        pickles.changes_a_default,
    ),
    *_rows(
        *("change the model before the block", FRESH, watch.next_request(tampering.answers)),
        pickles.changes_a_module_of_the_model,
        pickles.changes_the_model_within_a_module,
    ),
    # --- the next request ----------------------------------------------------------------------------
    *_rows(
        *("change what the model computes", FRESH, watch.next_request(tampering.answers)),
        tampering.overwrites_weights,
        tampering.overwrites_weights_through_the_envoy,
        tampering.overwrites_weights_through_numpy,
        tampering.replaces_a_parameter,
        tampering.replaces_a_module,
        tampering.adds_a_hook,
        tampering.adds_a_hook_to_everything,
        tampering.sets_training,
        tampering.changes_the_configuration,
        tampering.casts_the_model,
    ),
    *_rows(
        *("change the tokenizer", FRESH, watch.next_request(tampering.tokens)),
        tampering.changes_the_tokenizer,
        tampering.changes_the_side_of_padding,
    ),
    *_rows(
        *("leave a mark", FRESH, watch.next_request(tampering.stays_in_envoys)),
        tampering.leaves_attributes,
    ),
    *_rows(
        *("change torch's settings", FRESH, watch.next_request(tampering.settings_of_torch)),
        tampering.sets_default_dtype,
        tampering.sets_default_device,
        tampering.sets_the_seed,
        tampering.sets_threads,
        tampering.sets_determinism,
    ),
    *_rows(
        *("replace functions", FRESH, watch.next_request(tampering.functions_work)),
        tampering.replaces_a_function_of_torch,
        tampering.replaces_a_method_of_tensors,
        tampering.replaces_a_function_of_math,
        tampering.replaces_a_builtin,
        tampering.replaces_a_module_of_pythons,
        tampering.replaces_the_servers_pickler,
        tampering.replaces_the_servers_generation,
        tampering.replaces_nnsights_envoy,
    ),
    *_rows(
        *("change the process", FRESH, watch.next_request(tampering.state_of_the_process)),
        tampering.leaves_a_variable,
        tampering.leaves_a_folder,
        tampering.leaves_a_module,
        tampering.leaves_a_thread,
        tampering.leaves_a_trace,
        tampering.leaves_a_signal,
        tampering.leaves_no_collector,
        tampering.leaves_a_filter,
    ),
    # --- earlier requests ----------------------------------------------------------------------------
    *(
        Attack(look, "read an earlier request's secret", FRESH, watch.earlier_secret(leave))
        for leave, look in (
            (leakage.leaves_it_on_the_model, leakage.looks_at_the_model),
            (leakage.leaves_it_in_a_buffer, leakage.looks_at_buffers),
            (leakage.leaves_it_in_weights, leakage.looks_at_weights),
            (leakage.leaves_it_in_a_module, leakage.looks_at_a_module),
            (leakage.leaves_it_in_the_environment, leakage.looks_at_the_environment),
            (leakage.leaves_it_in_objects, leakage.looks_at_all_objects),
            (leakage.leaves_it_in_a_frame, leakage.looks_at_all_frames),
            (leakage.leaves_it_in_a_descriptor, leakage.looks_at_descriptors),
            (leakage.leaves_it_in_the_tokenizer, leakage.looks_at_the_tokenizer),
        )
    ),
    Attack(
        leakage.looks_at_files,
        "read an earlier request's secret",
        BOTH,
        watch.earlier_secret(leakage.leaves_it_in_a_file),
    ),
    # --- frames --------------------------------------------------------------------------------------
    *_rows(
        *("break the host's reading", FRAMES, watch.ServerUnharmed),
        frames.lies_about_the_header,
        frames.lies_about_the_body,
        frames.lies_a_little,
        frames.sends_no_json,
        frames.sends_no_text,
        frames.sends_no_object,
        frames.sends_no_kind,
        frames.sends_a_kind_that_is_no_text,
        frames.sends_depths,
        frames.sends_depths_in_a_log,
        frames.sends_a_huge_number,
        frames.sends_a_result_without_its_cost,
        frames.sends_a_result_with_a_wrong_cost,
        frames.sends_a_result_over_the_limit,
        frames.sends_a_result_just_over_the_limit,
        frames.sends_an_error_of_megabytes,
        frames.says_spilled_without_a_file,
        expected_error=PROTOCOL,
    ),
    *_rows(
        *("pass for more than it is", FRAMES, watch.ServerUnharmed),
        frames.sends_a_cost_that_is_no_number,
        frames.sends_a_negative_cost,
        frames.sends_an_astronomic_cost,
        frames.sends_a_cost_that_is_no_text,
        frames.sends_a_cost_of_depths,
        expected_error=r"broke its protocol .*(malformed|\$\.report)",
    ),
    *_rows(
        *("pass for more than it is", FRAMES, watch.ServerUnharmed),
        frames.sends_half_a_frame_and_ends,
        expected_error=r"exited \(exit code 0\) before the block was done",
    ),
    *_rows(
        *("speak as another", FRAMES, watch.ServerUnharmed),
        frames.sends_an_unknown_kind,
        frames.sends_kinds_of_the_control_channel,
        frames.floods_with_statuses,
        frames.asks_for_many_files,
        expected_error=PROTOCOL,
    ),
    *_rows(
        *("be taken at its word", FRAMES, watch.ServerUnharmed),
        frames.spills_a_lie,
        # Only the attacker's client fails.
        expected_error=f"{PROTOCOL}|in the client",
    ),
    *_rows(
        *("have the host hold descriptors", FRAMES, watch.ServerUnharmed),
        frames.sends_descriptors,
        expected_error=f"{PROTOCOL}|PermissionError",
    ),
    *_rows(
        *("flood the user", LIMIT, watch.LimitHolds),
        frames.floods_with_logs,
        expected_error=f"{LOG}|{LINES}",
    ),
    *_rows(
        *("flood the user", FRAMES, watch.LimitHolds),
        frames.floods_with_streams,
        frames.floods_with_a_large_stream,
        # Clients of this generation do not support streams.
        expected_error=f"{STREAM}|{PROTOCOL}|in the client: .*STREAM",
    ),
    *_rows(
        *("hold the host", FRAMES, watch.LimitHolds),
        frames.floods_with_unknown_kinds,
        frames.sends_half_a_frame,
        frames.sends_a_frame_slowly,
        expected_error=f"{TIME}|{PROTOCOL}",
    ),
    *_rows(
        *("fill the disk", LIMIT, watch.DiskStays),
        frames.fills_the_disk,
        frames.fills_the_disk_with_a_hole,
    ),
    *_rows(
        # Even a trusted runner must report its reset before it gets another request.
        *("answer another's request", FRAMES, watch.next_request(tampering.answers)),
        frames.answers_twice,
        frames.answers_for_the_next,
        expected_error="FORGED|mine",
    ),
    *_rows(
        *("live on", FRAMES, watch.NobodySurvives),
        frames.answers_and_goes_on,
        expected_error="FORGED|mine",
    ),
    *_rows(
        *("live on", FRAMES, watch.NobodySurvives),
        frames.closes_and_goes_on,
        frames.closes_and_works_on,
        expected_error="ended|exited",
    ),
]
"""The table."""

"""Routes that users of this kind of server type and that this version does not have: each says so, and why.

Owns the list. A route leaves it in the change that makes it work.
"""

from __future__ import annotations

from ceiba.server.auth import Access

_LATER = "not available yet"
_LORA = "not available yet: LoRA adapters"
_WEIGHTS = "not available yet: changing weights at run time"
_ONE_MODEL = "this server has one model, chosen when it starts"
_EXPERTS = "not available yet: expert statistics"
_PAUSE = "not available yet: pausing generation"
_PROFILE = "not available yet: profiling through the server"

ROUTES: tuple[tuple[str, tuple[str, ...], Access, str], ...] = (
    # path, methods, who may call it once it works, why not yet
    ("/v1/audio/transcriptions", ("POST",), Access.USER, "not available yet: audio"),
    ("/invocations", ("POST",), Access.USER, _LATER + ": use /v1/chat/completions"),
    ("/vertex_generate", ("POST",), Access.USER, _LATER + ": use /generate"),
    ("/api/pull", ("POST",), Access.ADMIN, _ONE_MODEL),
    ("/api/push", ("POST",), Access.ADMIN, _ONE_MODEL),
    ("/api/create", ("POST",), Access.ADMIN, _ONE_MODEL),
    ("/api/copy", ("POST",), Access.ADMIN, _ONE_MODEL),
    ("/api/delete", ("DELETE",), Access.ADMIN, _ONE_MODEL),
    ("/v1/models/load", ("POST",), Access.ADMIN, "not available yet: several models behind one port"),
    ("/v1/models/unload", ("POST",), Access.ADMIN, "not available yet: several models behind one port"),
    ("/pause_generation", ("POST",), Access.ADMIN, _PAUSE),
    ("/continue_generation", ("POST",), Access.ADMIN, _PAUSE),
    ("/start_profile", ("GET", "POST"), Access.ADMIN, _PROFILE),
    ("/stop_profile", ("GET", "POST"), Access.ADMIN, _PROFILE),
    ("/set_trace_level", ("GET", "POST"), Access.ADMIN, "not available yet: tracing"),
    ("/configure_logging", ("GET", "POST"), Access.ADMIN, _LATER + ": set --log-level at start"),
    ("/set_internal_state", ("POST",), Access.ADMIN, _LATER),
    ("/freeze_gc", ("GET", "POST"), Access.ADMIN, _LATER),
    ("/slow_down", ("GET", "POST"), Access.ADMIN, _LATER),
    ("/release_memory_occupation", ("GET", "POST"), Access.ADMIN, _WEIGHTS),
    ("/resume_memory_occupation", ("GET", "POST"), Access.ADMIN, _WEIGHTS),
    ("/update_weights_from_disk", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/update_weights_from_tensor", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/update_weights_from_distributed", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/update_weights_from_ipc", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/init_weights_update_group", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/destroy_weights_update_group", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/begin_weight_update", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/end_weight_update", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/update_weight_version", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/get_weights_by_name", ("GET", "POST"), Access.ADMIN, _WEIGHTS),
    ("/weights_checker", ("POST",), Access.ADMIN, _WEIGHTS),
    ("/load_lora_adapter", ("POST",), Access.ADMIN, _LORA),
    ("/load_lora_adapter_from_tensors", ("POST",), Access.ADMIN, _LORA),
    ("/unload_lora_adapter", ("POST",), Access.ADMIN, _LORA),
    ("/pd_role_switch", ("POST",), Access.ADMIN, "not available yet: prefill/decode separation"),
    ("/start_expert_distribution_record", ("GET", "POST"), Access.ADMIN, _EXPERTS),
    ("/stop_expert_distribution_record", ("GET", "POST"), Access.ADMIN, _EXPERTS),
    ("/dump_expert_distribution_record", ("GET", "POST"), Access.ADMIN, _EXPERTS),
)
